"""`horovod` in a job that `--as-horovod` started: see horo_lite.horovod.install."""

import sys

from horo_lite.horovod.aliases import alias, install

is_horo_lite = True
# If a real Horovod is installed, the command line has refused, unless told to replace it.
install(replace=True)
sys.modules[__name__] = alias(__name__)  # the import statement returns this module
