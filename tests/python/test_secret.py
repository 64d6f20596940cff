"""The secret that processes on several machines share."""

from __future__ import annotations

import stat
import threading
from pathlib import Path

import pytest

from pybackend import cli
from pybackend.core.errors import InputError
from pybackend.core.net.authentication import derive_token, find_secret, make_secret

TEXT = "0123456789abcdef"


def test_a_variable_goes_before_a_file_and_that_before_the_users_own(tmp_path: Path) -> None:
    own = tmp_path / "tfdist" / "secret"
    make_secret(own)
    named = tmp_path / "named"
    make_secret(named)
    everything = {
        "TFDIST_SECRET": TEXT,
        "TFDIST_SECRET_FILE": str(named),
        "XDG_CONFIG_HOME": str(tmp_path),
    }
    assert find_secret(False, everything) == TEXT
    del everything["TFDIST_SECRET"]
    assert find_secret(False, everything) == named.read_text().strip()
    del everything["TFDIST_SECRET_FILE"]
    assert find_secret(False, everything) == own.read_text().strip()


def test_on_one_machine_the_users_own_is_made(tmp_path: Path) -> None:
    environment = {"XDG_CONFIG_HOME": str(tmp_path)}
    with pytest.raises(InputError, match="need a shared secret"):
        find_secret(False, environment)
    made = find_secret(True, environment)
    path = tmp_path / "tfdist" / "secret"
    assert (stat.S_IMODE(path.stat().st_mode), len(made)) == (0o600, 64)
    assert list(path.parent.iterdir()) == [path]


def test_of_many_that_make_it_at_once_all_read_the_same(tmp_path: Path) -> None:
    found: list[str] = []

    def find() -> None:
        found.append(find_secret(True, {"XDG_CONFIG_HOME": str(tmp_path)}))

    threads = [threading.Thread(target=find) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(found), len(set(found))) == (16, 1)


def test_what_others_can_read_and_what_can_be_guessed_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    make_secret(path)
    path.chmod(0o640)
    with pytest.raises(InputError, match=f"chmod 600 {path}"):
        find_secret(False, {"TFDIST_SECRET_FILE": str(path)})
    with pytest.raises(InputError, match="has 5 characters"):
        find_secret(False, {"TFDIST_SECRET": "short"})
    with pytest.raises(InputError, match="which does not exist"):
        find_secret(True, {"TFDIST_SECRET_FILE": str(tmp_path / "none")})


def test_tokens_differ_by_what_they_are_for() -> None:
    assert len({derive_token(TEXT, *parts) for parts in [(), ("a",), ("b",), ("a", "b")]}) == 4
    assert derive_token(TEXT, "a") == derive_token(TEXT, "a")


def test_the_command_keeps_a_secret_that_is_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "new" / "secret"
    assert cli.main(["secret", str(path)]) == 0
    made = path.read_text()
    assert cli.main(["secret", str(path)]) == 0
    assert path.read_text() == made
    shown = capsys.readouterr().out
    assert "a new secret" in shown
    assert "a secret already exists; left unchanged" in shown
    assert made.strip() not in shown
