import codecs

import pytest

from zagora_jax.checkpoints.json_files import parse_json_object
from zagora_jax.errors import UserError


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "is a Git LFS pointer.*git lfs pull"),
        (codecs.BOM_UTF8 + b"{}", "begins with a byte-order mark.*Save it as UTF-8 without one"),
        (
            b"\n<!doctype html>",
            "is no JSON but a web page or XML: b'<!doctype html>.*Download it again",
        ),
        (b"", "is not valid JSON: Expecting value"),
        ("{}".encode("utf-16"), "is not valid JSON: 'utf-8' codec"),
        (b"[" * 100_000, "is not valid JSON: maximum recursion"),
        (b'{"a": 1, "a": 2}', "the key 'a' stands twice"),
        (b'{"a": ' + b"9" * 400 + b"}", "a number of 400 digits"),
        (b"[]", "expected a JSON object, found list"),
    ],
)
def test_what_is_no_json_object_is_named(data, message):
    with pytest.raises(UserError, match=f"^config.json.*{message}"):
        parse_json_object(data, "config.json")
