"""The program: `vllm-hisparse`, or `python -m vllm_hisparse.cli`."""

import signal

__all__ = ["main"]


def main() -> None:
    """Runs the command line.

    Ctrl-C ends it as it ends a program that is not Python's: at once wherever it is, also in an import, and
    without a traceback. Commands that start processes hold it up, see `signals`.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a script's background job ignores it
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from vllm_hisparse.cli.main import app

    app()


if __name__ == "__main__":
    main()
