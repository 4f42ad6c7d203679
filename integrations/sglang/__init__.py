"""SGLang decodes GDN, KDA and Mamba-2 layers with ReplaySSM: a plugin that SGLang finds and loads by itself."""

from __future__ import annotations


def activate() -> None:
    """What SGLang's plugin loader calls in each of its processes, before arguments are parsed.

    SGLang logs a plugin's errors and goes on without it. So an error is kept here, and a server that chose the backend is
    stopped with it while its arguments are resolved; a server that did not choose it runs as if nothing was installed.
    """
    from . import names

    if names.present(names.BUILT_IN):
        return
    from . import arguments

    failure: Exception | None = None
    targets: list[str] = []
    try:
        names.check_version()
        from . import hooks

        targets = hooks.register()
    except Exception as error:  # whatever it is, it is what the user must read
        failure = error
    arguments.register(failure, targets)
