"""One answer of those that several replicas gave."""

from __future__ import annotations

from collections.abc import Mapping


def label_metrics(texts: Mapping[str, str]) -> str:
    """Prometheus texts of replicas, by name, as one text: each sample gets a `replica` label, each metric is described
    once, and what belongs to one metric stands together, as the format wants it."""
    descriptions: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for name, text in texts.items():
        family = ""
        for line in text.splitlines():
            if line.startswith("# "):
                _, _, family, *_ = line.split(" ", 3)
                lines = descriptions.setdefault(family, [])
                if line not in lines:
                    lines.append(line)
            elif line:
                samples.setdefault(family, []).append(_labelled(line, name))
    return "".join(f"{line}\n" for family in descriptions for line in descriptions[family] + samples.get(family, []))


def _labelled(sample: str, name: str) -> str:
    """`name{a="b"} 1` or `name 1`; label values may hold spaces and braces."""
    brace, space = sample.find("{"), sample.find(" ")
    if 0 <= brace < space:
        return f'{sample[: brace + 1]}replica="{name}",{sample[brace + 1 :]}'
    return f'{sample[:space]}{{replica="{name}"}}{sample[space:]}'
