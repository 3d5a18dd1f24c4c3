"""vkback: every command, each in a file of its own."""

from __future__ import annotations

from typing import NoReturn

from vkback.cli import (
    chat,
    compare,
    compare_model,
    devices,
    doctor,
    explain,
    finetune,
    generate,
    graph,
    history,
    kernels,
    merge,
    perplexity,
    plan,
    profile,
    serve,
    synth,
    test_ops,
    train_parity,
    tune,
)
from vkback.cli.shell import new_app, run

app = new_app("GGUF models on any Vulkan device: run, inspect, compare. Speed is measured by vkbench.")
app.command("devices")(devices.devices)
app.command("run")(generate.generate)
app.command("chat")(chat.chat)
app.command("serve")(serve.serve)
app.command("perplexity")(perplexity.perplexity)
app.command("synth")(synth.synth)
app.command("graph")(graph.graph)
app.command("plan")(plan.plan)
app.command("profile")(profile.profile)
app.command("test-ops")(test_ops.test_ops)
app.command("compare")(compare_model.compare)
app.command("compare-bench")(compare.compare)
app.command("history")(history.history)
app.command("doctor")(doctor.doctor)
app.command("tune")(tune.tune)
app.command("explain")(explain.explain)
app.command("finetune")(finetune.finetune)
app.command("merge")(merge.merge)
app.command("train-parity")(train_parity.train_parity)
app.command("kernels")(kernels.kernels)


def main() -> NoReturn:
    run(app, "vkback")


if __name__ == "__main__":
    main()
