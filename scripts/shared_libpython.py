"""Exit with status 0 if this Python's shared library loads, which reticulate embeds in R."""

import ctypes
import os
import sysconfig

folder = sysconfig.get_config_var("LIBDIR") or ""
name = sysconfig.get_config_var("INSTSONAME") or sysconfig.get_config_var("LDLIBRARY") or ""
try:
    ctypes.CDLL(os.path.join(folder, name))
except OSError as error:
    raise SystemExit(f"no shared libpython: {error}") from None
