"""Write what this version leaves behind, for later ones to take up: `make stored`.

Each case is begun in a folder elsewhere and kept as it lies there. Then the original goes on,
without a copy or an adoption; what it comes to is what a later version must come to.
"""

import json
import os
import shutil
import tempfile
import tomllib
from pathlib import Path

from tests.stored.cases import CASES

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


def write(kept, place):
    """Begin every case in `place`, keep it in `kept`, and go on with the original."""
    digests = {}
    for name, case in CASES.items():
        (place / name).mkdir()
        os.chdir(place / name)
        case.begin()
        shutil.copytree(place / name, kept / name)
        digests[name] = case.go_on().digests()
    os.chdir(ROOT)
    (kept / "digests.json").write_text(
        json.dumps(digests, indent=1, sort_keys=True) + "\n", "ascii"
    )


def main():
    """Replace the folder of this version, unless it is released."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    if f"## {version} (unreleased)" not in (ROOT / "CHANGELOG.md").read_text("utf-8"):
        raise SystemExit(f"{version} is released: what it has left is never written again")
    folder = HERE / version.rpartition(".")[0]
    with tempfile.TemporaryDirectory(prefix="dpstream-stored-") as place:
        kept = Path(place) / "kept"
        write(kept, Path(place))
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(kept, folder)
    print(f"written: {folder.relative_to(ROOT)}, with the digests of {len(CASES)} cases")


if __name__ == "__main__":
    main()
