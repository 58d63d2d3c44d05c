#!/bin/sh
# Runs the server of this federation until its run is done. Started again, it resumes from its last checkpoint.
cd "$(dirname "$0")" && exec fedxl deploy serve .
