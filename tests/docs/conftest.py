"""The source archive has no guides: there is nothing to follow in it."""

from tests.docs.pages import ROOT

collect_ignore_glob = [] if (ROOT / "docs" / "guides").is_dir() else ["test_*.py"]
