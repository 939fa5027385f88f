"""`horovod` in a job that `--as-horovod` started: see horo_lite.horovod.install."""

import sys

from horo_lite.horovod.aliases import alias, install

is_horo_lite = True
# The command line has refused, unless told otherwise, where a real Horovod is installed.
install(replace=True)
sys.modules[__name__] = alias(__name__)  # which is what the import then returns
