"""Writes the table of outcomes of PyTorch's tests into the README of dist-torch.

    python suite_table.py FOLDER

The folder has the files BACKEND-RANKS.json of pytorch_suite.py. It fails if a test passes with Gloo and not with dist.
"""

import collections
import json
import pathlib
import re
import sys

README = pathlib.Path(__file__).parent.parent / "README.md"
BEGIN, END = "<!-- outcomes -->\n", "<!-- end of outcomes -->\n"
KINDS = ("passed", "failed", "skipped")


def main():
    folder = pathlib.Path(sys.argv[1])
    lines = ["| ranks | backend | passed | failed | skipped |", "|---|---|---|---|---|"]
    worse, reasons = {}, collections.Counter()
    for ranks in (2, 3, 4):
        outcomes = {}
        for backend in ("gloo", "dist"):
            outcomes[backend] = json.loads((folder / f"{backend}-{ranks}.json").read_text())
            counts = collections.Counter(outcome["kind"] for outcome in outcomes[backend].values())
            lines.append(f"| {ranks} | {backend} | " + " | ".join(str(counts[kind]) for kind in KINDS) + " |")
        for name, outcome in outcomes["dist"].items():
            if outcome["kind"] == "skipped":
                reasons[outcome["why"]] += 1
            elif outcome["kind"] == "failed" and outcomes["gloo"][name]["kind"] == "passed":
                worse.setdefault(name, outcome["why"])
    lines += ["", "Tests that pass with Gloo and not with dist:", ""]
    lines += [f"- `{name}`: {why}" for name, why in sorted(worse.items())] or ["None."]
    lines += ["", "Reasons for which tests are skipped, with dist as with Gloo, on 2, 3 and 4 ranks together:", ""]
    lines += ["| skipped | reason that the test gives |", "|---|---|"]
    lines += [f"| {count} | {as_link(why)} |" for why, count in reasons.most_common()]
    before, rest = README.read_text().split(BEGIN)
    README.write_text(before + BEGIN + "\n" + "\n".join(lines) + "\n\n" + END + rest.split(END)[1])
    print(f"{len(worse)} tests pass with Gloo and not with dist")
    sys.exit(1 if worse else 0)


def as_link(text):
    return re.sub(r"https://\S+", r"<\g<0>>", text)


if __name__ == "__main__":
    main()
