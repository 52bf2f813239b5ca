"""The picture of `bench map`: tokens per second over the batch, a panel for each context and way."""

from collections.abc import Sequence
from typing import Any

from sparda_jax.cache.host_dtype import KvHostDtype

MAP = "map"
"""What a result file's entry ``picture`` says if it is to be drawn so."""
SETTINGS = ("kv_host_dtype", "context", "batch", "slots", "slots_are")
"""What each row of such a file has among its settings."""
_COLORS = ("C0", "C1", "C2", "C3", "C4", "C5")


def _panel(row: dict[str, Any]) -> tuple[str, str, int]:
    """What the rows of one panel have in common."""
    return row["name"], row["settings"]["kv_host_dtype"], row["settings"]["context"]


def draw_map(drawing: Any, rows: Sequence[dict[str, Any]]) -> None:
    """Draws rows on an empty figure: lines by slots, their floors dashed, the paper's figures as crosses."""
    panels = sorted({_panel(row) for row in rows})
    axes = drawing.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    drawing.set_size_inches(4.2 * len(panels) + 0.8, 4.6)
    kinds = list(
        dict.fromkeys(row["settings"]["slots_are"] for row in sorted(rows, key=lambda row: row["settings"]["slots"]))
    )
    colors = dict(zip(kinds, _COLORS * len(kinds), strict=False))
    for panel, key in zip(axes, panels, strict=True):
        name, kept, context = key
        mine = [row for row in rows if _panel(row) == key]
        mine.sort(key=lambda row: row["settings"]["batch"])
        for kind in kinds:
            line = [row for row in mine if row["settings"]["slots_are"] == kind]
            if not line:
                continue
            batches = [row["settings"]["batch"] for row in line]
            panel.plot(batches, [row["value"] for row in line], "o-", color=colors[kind], label=f"slots: {kind}")
            panel.plot(batches, [row["floor"] for row in line], "--", color=colors[kind], linewidth=0.8)
        paper = {row["settings"]["batch"]: row["settings"].get("paper_tokens_per_s") for row in mine}
        published = [(batch, value) for batch, value in paper.items() if value is not None]
        if published:
            panel.plot(*zip(*published, strict=True), "kx", label="paper, H100")
        packed = "" if kept == KvHostDtype.AUTO else f", {kept} on the host"
        panel.set_title(f"{name}, {context // 1024}K tokens{packed}", fontsize=10)
        panel.set_xlabel("sequences", fontsize=9)
        panel.set_xscale("log", base=2)
        ticks = sorted({row["settings"]["batch"] for row in mine})
        panel.set_xticks(ticks, [str(tick) for tick in ticks], fontsize=8)
        panel.set_xticks([], minor=True)
        panel.set_ylim(bottom=0)
        panel.grid(alpha=0.3)
    axes[0].set_ylabel("tokens/s; dashed: floor", fontsize=9)
    handles: dict[str, Any] = {}
    for panel in axes:
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    drawing.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=len(handles), fontsize=8)
