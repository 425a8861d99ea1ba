"""The command line: ``gramtower fit``, ``tune``, ``evaluate``, ``recommend``, ``similar``, ``compare`` and others."""

from gramtower.cli.program import main as main
