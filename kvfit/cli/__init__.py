"""The command line: parse, call one verb, print one line. Errors become exit codes only in `kvfit.cli.console`."""
