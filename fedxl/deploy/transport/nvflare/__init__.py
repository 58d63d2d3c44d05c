"""NVIDIA FLARE as the transport: our Controller in FLARE's server job, our Executor in each site's.

FLARE authenticates its members by certificates of the federation's authority, and its server and members trust each
other. Requests go to `answer`, so that a site's own site.toml decides what it computes, as with every transport. Jobs
carry no code: the sites' policy (`job.files`) admits our Executor, and no other class.
"""
