#!/bin/sh
# Makes what docker-compose.yml reads from secrets/: a database password of this installation's own. Never overwrites.
# The folder is its owner's alone; the files in it are readable, because the containers' users are not root.
set -eu
cd "$(dirname "$0")/.."
mkdir -p -m 700 secrets
cd secrets
if [ -e postgres_password ]; then
    echo "secrets/postgres_password is there already: nothing is changed" >&2
    exit 0
fi
umask 022
password=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')
printf '%s' "$password" > postgres_password
printf 'postgresql://pipeplan:%s@postgres:5432/pipeplan' "$password" > database_url
: > agent_token
echo "made secrets/: next, the tokens (docs/operations.md)" >&2
