"""Which commands of the documentation are run shorter, by another test, or not at all; all others run as they are.

Patterns match whole lines. Each must match a line of some page: test_accounts.py says which do not.
"""

from __future__ import annotations

# Arguments added so that a command takes seconds. The last of two values counts.
SHORT = "--set run.rounds=2 --set run.local_steps=2"
SHORTER = {
    r"fedxl train (examples/digits|table|ranking|survival|tune/digits/best)\.toml.*": SHORT,
    r"fedxl tune .*": f"--trials 2 {SHORT}",
}

# Run by another test.
CONTRACT = "tests/docs/test_accounts.py::test_the_contract_in_the_design_is_the_protocols"
DEPLOYED = "tests/docs/test_deployments.py::test_the_images_of_three_hospitals_at_real_sites"
ELSEWHERE = {
    r"docker compose .*": "tests/containers/test_trial.py::test_the_trial_of_compose_trains_and_stops",
    r"sbatch .*": "tests/containers/test_slurm.py::test_a_job_trains_first_and_resumes_once_it_is_queued_again",
    r"fedxl demo": "tests/cli/test_cli.py::test_the_demo_writes_its_table_and_plot",
    r"fedxl train .* --devices \d+": "tests/cli/test_processes.py::"
    "test_a_rank_that_is_killed_ends_the_run_in_one_line_and_it_can_be_resumed",
    r"fedxl resume .* --devices \d+": "tests/cli/test_processes.py::"
    "test_a_rank_that_is_killed_ends_the_run_in_one_line_and_it_can_be_resumed",
    r"fedxl deploy local .*": DEPLOYED,
    r"fedxl deploy submit .*": "tests/deploy/test_nvflare.py::"
    "test_flare_runs_nothing_but_fedxl_and_a_run_equals_the_simulators_whoever_is_killed",
}
BLOCKS_ELSEWHERE = {
    "docs/deployment.md: histogram.load(": DEPLOYED,
    "docs/design.md: def init(self, weights)": CONTRACT,
    "docs/guides/data.md: fedxl deploy init federation": DEPLOYED,
}

# Mistakes whose message a page shows, and the command that makes each.
MISTAKES = {
    "fedxl: unknown setting 'algorithm.lrr'; did you mean 'algorithm.lr'?": (
        "fedxl train digits.toml --set algorithm.lrr=1"
    ),
}

# Not run: why. Their arguments are read by the program's own parser (test_forms.py).
NOT_RUN = {
    r"pip install .*": "needs a package index; the extras exist",
    r"make \S+": "CI itself runs these targets, or they take minutes; the targets exist",
    r"python benchmarks/.*": "takes minutes; it is loaded, and reads its arguments",
    r"(for .*\n)?python -m studies [\s\S]*": "takes minutes to days; tests/studies runs small ones",
    r"python -m benchmarks.step .*": "compiles for minutes, for a GPU; tests/benchmarks runs small ones",
    r"docker (build|run) .*|kubectl .*": "needs a daemon or a cluster; tests/containers runs what these start",
    r"torchrun .*": "eight processes; tests/engine/test_ranks.py runs some",
    r"(flower-supernode|flwr) .*": "needs a federation of Flower; tests/deploy/test_flower.py has one",
}
