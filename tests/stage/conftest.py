"""Properties are checked the same way on a busy machine as on an idle one: no deadline."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile("airlift", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("airlift")
