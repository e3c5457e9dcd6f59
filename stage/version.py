"""The version of airlift. The modules of `stage` import it from here, not from `stage`.

`stage/__init__.py` names modules of every layer, for type checkers. A module that imported `stage`
would thereby import a higher layer, and `lint-imports` would report it.
"""

__version__ = "0.2.0"
