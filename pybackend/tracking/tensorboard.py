"""Event files of training runs for TensorBoard."""

from __future__ import annotations

from pybackend.api.calls import explain_arguments
from pybackend.api.observer import EventFolder
from pybackend.job.call_options import Place
from pybackend.job.tensorboard import check_folder


@explain_arguments
def track_tensorboard(folder: Place | None = None) -> EventFolder:
    """Write a training run's event files for TensorBoard. Pass the result in ``callbacks``.

    They contain the metrics of each epoch, the metrics of rank 0's rows every 50 steps, and the
    graph. On any cluster, rank 0 writes them with Keras's callback and sends them here at the end
    of each epoch and every 10 seconds. See ``tfdist tensorboard``, `view_tensorboard` and
    `TrainResult.tensorboard`. For a profile, pass a ``keras.callbacks.TensorBoard`` instead.

    Parameters
    ----------
    folder
        Folder on this machine. A URI that TensorFlow can write to: rank 0 writes there directly.
        None (default): a new folder in ``logs`` for each training run. Each trial of `train_many`
        has a folder in it: ``trial-1``, ...

    Returns
    -------
    EventFolder
        An object for ``callbacks``.

    Raises
    ------
    InputError
        ``folder`` is neither a folder nor a URI.

    Examples
    --------
    >>> callbacks = [track_tensorboard("logs/run1")]  # doctest: +SKIP
    """
    return EventFolder(check_folder(folder))
