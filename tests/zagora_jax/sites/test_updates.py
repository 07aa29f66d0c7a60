"""Updates as files: what is written is read, and nothing else is."""

import pickle

import numpy as np
import pytest
from several_sites import SHAPES, update, vectors

from zagora_jax.errors import UserError
from zagora_jax.sites.outer import Global, zeros
from zagora_jax.sites.updates import Update, compress, expand, global_file, read_global, read_update, update_file

NAME = "rounds/000003/home.safetensors"
# Of a block's largest value, half of what its codes are apart: 1 / 127 and 1 / 7, the scale rounded up by 1 in 256.
PRECISION = {"none": 0.0, "int8": 0.5 / 127 * 257 / 256, "int4": 0.5 / 7 * 257 / 256}


def read(path, content, **expected):
    path.write_bytes(content)
    return read_update(path, NAME, SHAPES, **({"site": "home", "round_number": 3} | expected))


@pytest.mark.parametrize("compression", ["none", "int8", "int4"])
def test_an_update_is_read_as_it_was_written(tmp_path, compression):
    sent = update(1, compression)
    found = read(tmp_path / "file", update_file(sent, site="home", round_number=3))
    assert found.compression == compression
    for name, values in found.vectors(SHAPES).items():
        np.testing.assert_array_equal(values, sent.vectors(SHAPES)[name])
        assert np.abs(values - vectors(1)[name]).max() <= PRECISION[compression] * np.abs(vectors(1)[name]).max()


@pytest.mark.parametrize("compression", ["int8", "int4"])
def test_what_is_rounded_off_is_sent_with_the_next_updates(compression):
    """Sent and kept together are all that was to be sent; and what is kept does not grow."""
    residual, wanted, arrived = zeros(vectors(0)), zeros(vectors(0)), zeros(vectors(0))
    for seed in range(20):
        messages, residual = compress(vectors(seed), residual, compression)
        came = expand(messages, SHAPES, compression)
        for name in SHAPES:
            wanted[name] += vectors(seed)[name]
            arrived[name] += came[name]
    for name in SHAPES:
        np.testing.assert_allclose(arrived[name] + residual[name], wanted[name], atol=1e-4)
        # A value is at most 4 + what is kept, so that what is kept is at most PRECISION * 4 / (1 - PRECISION).
        assert np.abs(residual[name]).max() < PRECISION[compression] * 4.5 / (1 - PRECISION[compression])
        assert np.abs(residual[name]).max() > 0


def test_a_global_adapter_is_read_as_it_was_written(tmp_path):
    for state in (Global(64, vectors(1), vectors(2)), Global.begin(vectors(1))):
        (tmp_path / "file").write_bytes(global_file(state))
        found = read_global(tmp_path / "file", "globals/any.safetensors", SHAPES, state.round)
        assert found.digest() == state.digest()


def not_finite(value):
    messages = {name: values.copy() for name, values in vectors(1).items()}
    messages["b"][2] = value
    return update_file(Update(messages, "none"), site="home", round_number=3)


def scale_of_infinity():
    messages = {name: values.copy() for name, values in update(1, "int8").messages.items()}
    messages["b"][-2:] = np.frombuffer(np.float32(np.inf).tobytes()[2:], np.uint8)  # the last block's scale
    return update_file(Update(messages, "int8"), site="home", round_number=3)


SOUND = update_file(update(1, "int8"), site="home", round_number=3)
OTHER = Update({"a": np.zeros((3, 41), np.float32), "b": np.zeros(7, np.float32)}, "none")


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (SOUND[:-9], "cut off"),
        (SOUND[:-1] + bytes([SOUND[-1] ^ 1]), "checksum"),
        (SOUND + b"x", "bytes after"),
        (SOUND[:6], "no safetensors file"),
        (b"", "no safetensors file"),
        (pickle.dumps({"a": [1.0] * 100}), r"limit|cut off"),
        (SOUND.replace(b'"compression":"int8"', b'"compression":"gzip"'), "compression: expected none, int8 or int4"),
        (update_file(update(1), site="office", round_number=3), "site: expected 'home', found 'office'"),
        (update_file(update(1), site="home", round_number=2), "round: expected '3', found '2'"),
        (
            update_file(OTHER, site="home", round_number=3),
            r"tensor a: expected float32\[3, 40\], found float32\[3, 41\]",
        ),
        (global_file(Global.begin(vectors(0))), "kind: expected 'update', found 'global'"),
        (not_finite(np.nan), "b holds numbers that are not finite"),
        (not_finite(-np.inf), "b holds numbers that are not finite"),
        (scale_of_infinity(), "b holds numbers that are not finite"),
    ],
)
def test_what_is_no_sound_update_is_refused_by_name(tmp_path, content, complaint):
    with pytest.raises(UserError, match=complaint) as error:
        read(tmp_path / "file", content)
    assert NAME in str(error.value)
    assert str(tmp_path) not in str(error.value)


def test_no_byte_of_a_file_can_change_unnoticed(tmp_path):
    for place in range(0, len(SOUND), 7):
        content = bytearray(SOUND)
        content[place] ^= 0x55
        try:
            found = read(tmp_path / "file", bytes(content))
        except UserError:
            continue
        # Spaces that pad the header, and names that only the header knows, may differ: no number does.
        assert {name: values.tolist() for name, values in found.messages.items()} == {
            name: values.tolist() for name, values in update(1, "int8").messages.items()
        }
