#!/usr/bin/env bash
# The plan at which an alias points, with curl and jq alone: plan.json, plan.env and train.sh. Status 7, where the alias
# points at another plan than the repository's lock. PIPEPLAN_URL and PIPEPLAN_TOKEN (scope `read`) are the pipeline's
# variables.
set -euo pipefail

get() { # ADDRESS FILE
    curl --silent --show-error --fail-with-body --retry 3 --header "Authorization: Bearer $PIPEPLAN_TOKEN" \
        "$PIPEPLAN_URL/v1$1" --output "$2" || { jq -r .detail "$2" >&2; exit 1; }
}

get /plans/gpt-prod plan.json
id=$(jq -r .id plan.json)
locked=$(jq -r .ids.plan_id pipeplan.lock)
if [ "$id" != "$locked" ]; then
    echo "gpt-prod points at $id, the lock holds $locked" >&2
    exit 7
fi
get "/plans/$id/exports/torchrun" train.sh # by the id: the alias may move meanwhile
jq -r '"PLAN_ID=\(.id)", "PLAN_SCHEDULE=\(.schedule)", "PLAN_STAGES=\(.depth)",
    "PLAN_MICROBATCH_SIZE=\(.microbatch_size)", "PLAN_MICROBATCHES=\(.microbatches)"' plan.json > plan.env
