"""No file of the net has been edited (`frozen.json`; `README.md` says when one may be).

`python tests/net/test_net_frozen.py` writes the digests anew.
"""

import hashlib
import json
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
MANIFEST = FOLDER / "frozen.json"
# Others that go through public calls only. They may move within `tests`.
OUTSIDE = ["test_optim_dtensor.py", "test_optim_torch.py"]


def digests():
    files = [
        path
        for path in FOLDER.iterdir()
        if path.suffix in (".py", ".json", ".pt") and path != MANIFEST
    ]
    for name in OUTSIDE:
        files += FOLDER.parent.rglob(name)
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(files)}


@pytest.mark.skipif(not MANIFEST.is_file(), reason="it is being recorded")
def test_no_file_of_the_net_was_edited():
    frozen, found = json.loads(MANIFEST.read_text()), digests()
    edited = sorted(
        name for name in frozen.keys() | found.keys() if frozen.get(name) != found.get(name)
    )
    assert not edited, (
        f"`{edited}` are not as frozen: a landing does not edit the net. hint: an edit is a commit "
        "of its own, whose message names the promise that is withdrawn or the defect that is "
        "mended, and which records the digests: python tests/net/test_net_frozen.py"
    )


if __name__ == "__main__":
    MANIFEST.write_text(json.dumps(digests(), indent=1, sort_keys=True) + "\n")
