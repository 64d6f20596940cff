"""The notebook of examples/, executed by a real kernel, which is then interrupted."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import nbformat
import pytest
from conftest import FORGE, wait_for, worker_processes
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "examples" / "notebooks" / "training.ipynb"
ENDLESS = """
import os, pathlib
started, kernel = pathlib.Path("started").absolute(), pathlib.Path("kernel")

class Mark(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        started.touch()

kernel.write_text(str(os.getpid()))
pybackend.barrier_train(
    "local", model, train, label="kind", workers=2, epochs=10**6, callbacks=[Mark()], verbose=0
)
"""


@pytest.mark.full
def test_the_notebook_runs_and_an_interrupt_ends_its_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("JUPYTER_RUNTIME_DIR", "JUPYTER_DATA_DIR", "JUPYTER_CONFIG_DIR", "IPYTHONDIR"):
        monkeypatch.setenv(name, str(tmp_path / "jupyter"))
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
    FORGE.start()
    notebook = nbformat.read(NOTEBOOK, 4)
    own = [cell for cell in notebook.cells if cell.cell_type == "code"]
    endless = new_code_cell(ENDLESS, metadata={"tags": ["raises-exception"]})
    last = new_code_cell("len(test)")
    notebook.cells += [endless, last]
    resources = {"metadata": {"path": str(tmp_path)}}
    client = NotebookClient(notebook, timeout=250, kernel_name="python3", resources=resources)
    interrupting = threading.Thread(target=interrupt, args=(tmp_path,), daemon=True)
    interrupting.start()
    client.execute()
    interrupting.join()

    _, plan, trained, plot, figures, table, _ = (own_output(cell) for cell in own)
    assert "arrays" not in plan["text/html"]
    assert "a data frame of 400 rows" in plan["text/html"]
    printed = [out.text for out in own[2].outputs if out.output_type == "stream"]
    assert "epoch 3/3" in "".join(printed)
    assert trained["text/html"].count("<path") == 4
    assert "image/png" in plot
    assert "'accuracy'" in figures["text/plain"]
    assert ".pred_lily" in table["text/html"]
    assert (tmp_path / "flowers.keras").is_file()
    assert (tmp_path / "flowers" / "saved_model.pb").is_file()
    # The interrupt ended the workers, and not the kernel.
    assert [out.ename for out in endless.outputs] == ["KeyboardInterrupt"]
    assert own_output(last)["text/plain"] == "100"
    wait_for(lambda: worker_processes() == [])


def own_output(cell: Any) -> Any:
    """Return the output of a cell's last value."""
    found = [out.data for out in cell.outputs if out.output_type == "execute_result"]
    return found[0] if found else {}


def interrupt(folder: Path) -> None:
    """Interrupt as Jupyter does, once the endless training has finished an epoch."""
    wait_for((folder / "started").exists, 250)
    os.killpg(os.getpgid(int((folder / "kernel").read_text())), signal.SIGINT)
