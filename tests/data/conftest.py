import pytest


@pytest.fixture
def folder(tmp_path):
    """A folder with three subfolders of 10 text files each, and one file that is not text."""
    for i in range(30):
        file = tmp_path / "docs" / f"part{i % 3}" / f"{i:02}.{('txt', 'md', 'py')[i % 3]}"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"document {i}: " + "ä" * i)
    (tmp_path / "docs" / "image.png").write_bytes(b"\x89PNG\xff")
    return tmp_path / "docs"
