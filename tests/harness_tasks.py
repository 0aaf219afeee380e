"""Tasks of lm-evaluation-harness over local files."""

import jsonl

TASK = """
task: {name}
dataset_path: json
dataset_kwargs:
  data_files: {{test: {data}}}
  cache_dir: {cache}
test_split: test
doc_to_text: "{{{{question}}}}"
output_type: {kind}
"""
SUMS = """
doc_to_target: "{{answer.split('#### ')[-1]}}"
generation_kwargs: {until: ["<never>"], do_sample: false, max_gen_toks: 37}
metric_list:
  - {metric: exact_match, aggregation: mean, higher_is_better: true}
filter_list:
  - name: answer
    filter:
      - {function: regex, regex_pattern: "The answer is: (-?[0-9]+)"}
      - {function: take_first}
"""
CHOICES = """
target_delimiter: ""
doc_to_choice: "{{choices}}"
doc_to_target: 0
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
"""


def write_task(folder, name, kind, rows, rest):
    """NAME.yaml and NAME.jsonl in a folder for --include_path."""
    data = jsonl.write(folder / f"{name}.jsonl", *rows)
    text = TASK.format(name=name, kind=kind, data=data, cache=folder / "cache")
    (folder / f"{name}.yaml").write_text(text + rest)
