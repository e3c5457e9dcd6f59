"""A first `environment.yml` for the nodes of a profile: what `runner train` needs. Pure."""

from __future__ import annotations

from stage.environment.spec.profile import Profile

_PACKAGES = (
    "deepspeed>=0.19.8,<0.20",
    "transformers>=5,<6",
    "datasets>=4,<6",
    "peft>=0.18",
    "accelerate",
    "safetensors>=0.5",
    "tensorboard>=2.15",
)
_INDEX = "--extra-index-url https://download.pytorch.org/whl"


def starter(profile: Profile) -> str:
    """The text of an `environment.yml`, with a torch that the profile's driver runs."""
    python, lines = "3.11", _torch(profile)
    if profile.provides:
        python = ".".join(profile.provides["python"].split(".")[:2])
        lines = ["# torch, numpy and what is compiled against torch are the site's"]
    pip = "".join(
        f"      {line}\n" if line.startswith("#") else f"      - {line}\n"
        for line in (*lines, *_PACKAGES)
    )
    return (
        f"# For the nodes of {profile.path.name}. Add what your own code imports; versions are "
        "pinned in the lock beside it.\n"
        f"name: {profile.path.stem}\n"
        + ("" if profile.provides else "channels: [conda-forge]\n")
        + f"dependencies:\n  - python={python}\n  - pip\n  - pip:\n{pip}"
    )


def _torch(profile: Profile) -> list[str]:
    if profile.cuda is None:
        return [
            "# the builds of PyPI bring 3 GB of CUDA, which these nodes have no GPU for",
            f"{_INDEX}/cpu",
            "torch>=2.6,<2.14",
            "numpy>=1.26",
        ]
    major = int(profile.cuda.partition(".")[0])
    if major < 12:
        return [f"{_INDEX}/cu118", "torch==2.6.0+cu118", "numpy>=1.26"]
    newest = "2.11" if major == 12 else "2.14"
    return [
        f"# the newest of PyPI that a driver with CUDA {profile.cuda} runs",
        f"torch>=2.6,<{newest}",
        "numpy>=1.26",
    ]
