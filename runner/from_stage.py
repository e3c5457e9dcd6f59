"""What `runner` takes from `stage`: one file of imports, and no other code.

What is here is light, and most commands need it. What else a file needs of bundles, environments
and clusters, it imports itself; `pyproject.toml` has the contract.
"""

from __future__ import annotations

from stage import __version__
from stage.bundle.verifier import state_folder
from stage.cli.base import Choice, Group, json_option, print_json, quiet_option, silent
from stage.cli.base import say as print_line
from stage.errors import (
    DamageError,
    IncompleteError,
    Mistakes,
    Place,
    PolicyError,
    StageError,
    UsageError,
    about,
    as_shown,
    join_errors,
    nearest_name,
    quoted,
    says_no_memory,
    shortage,
    suggest,
    suggest_path,
)
from stage.file_kinds import DS_CONFIG, RUN_FILE, check_kind, suggest_file
from stage.files import (
    format_age,
    hash_file,
    human_count,
    human_size,
    read_start,
    sync_folder,
    write_atomically,
    write_new,
)
from stage.installation import check_libraries, install_command
from stage.lock.reader import (
    HIDDEN,
    REQUIRED,
    Key,
    Lines,
    Reader,
    Where,
    WrongValueError,
    dotted,
    keys_of,
    lookup,
    plain,
    setting,
)
from stage.lock.yaml_lines import load_yaml_with_lines, read_value, reading_yaml, scalar
from stage.sandbox import close_network, isolated
from stage.text import save_as_utf8
