"""``python -m gramtower`` is the command line."""

from gramtower.cli import main

if __name__ == "__main__":
    main()
