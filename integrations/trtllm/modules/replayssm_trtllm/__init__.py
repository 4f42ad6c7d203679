"""For ``--custom_module_dirs``, which imports a folder by its name and puts the folder's parent first on sys.path.

Hence a folder whose parent holds nothing else: ``integrations`` there would shadow transformers.
"""

import replayssm.integrations.trtllm  # noqa: F401
