#!/bin/sh
# Runs this site of the federation until it is stopped (Ctrl-C).
cd "$(dirname "$0")" && exec fedxl deploy join .
