"""Reads a store of `qurl export --to mlflow` with MLflow's own client and prints what it found as JSON.

Usage: mlflow_store.py STORE EXPERIMENT
"""

import json
import os
import pathlib
import sys

os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
from mlflow import MlflowClient

client = MlflowClient(tracking_uri=pathlib.Path(sys.argv[1]).absolute().as_uri())
experiment = client.get_experiment_by_name(sys.argv[2])
runs = []
for run in client.search_runs([experiment.experiment_id]):
    history = {
        name: [[m.step, m.value] for m in client.get_metric_history(run.info.run_id, name)]
        for name in run.data.metrics
    }
    artifacts = [file.path for file in client.list_artifacts(run.info.run_id)]
    info = {"id": run.info.run_id, "name": run.info.run_name, "status": run.info.status}
    seconds = run.info.end_time and (run.info.end_time - run.info.start_time) / 1000
    runs.append({**info, "seconds": seconds, "params": run.data.params,
         "metrics": history, "artifacts": artifacts})
print(json.dumps({"experiments": len(client.search_experiments()), "runs": runs}))
