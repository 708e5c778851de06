import pytest

from pyg_scale.files.byte_size import byte_size


@pytest.mark.parametrize(
    ("given", "size"),
    [
        (7, 7),
        ("7", 7),
        ("4GB", 4 * 10**9),
        ("4g", 4 * 10**9),
        ("512 MiB", 512 * 2**20),
        ("1.5KB", 1500),
        (" 2 TiB ", 2 * 2**40),
        ("100b", 100),
    ],
)
def test_sizes(given, size):
    assert byte_size(given) == size


@pytest.mark.parametrize("given", ["", "GB", "4X", "-1GB", "4 ib", "1e9", 0, -5])
def test_what_is_no_size_is_refused(given):
    with pytest.raises(ValueError, match="memory must be"):
        byte_size(given, "memory")


@pytest.mark.parametrize("given", [1.5, None, True])
def test_what_is_of_another_type_is_refused(given):
    with pytest.raises(TypeError, match="memory must be"):
        byte_size(given, "memory")
