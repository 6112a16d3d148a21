"""The command line: one page a command, and the terminal they print to. Makes no rule."""
