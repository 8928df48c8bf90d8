#!/usr/bin/env bash
# Makes a machine a node of the cluster that config.yaml describes. `ray up` runs `node.sh head` on the head; the head
# runs the rest. Each command can be given again at any time: a node that is up to date is left alone.
#
#   node.sh head            starts the head unless it runs, and waits until the workers have joined
#   node.sh keep            (on the head, as long as it lives) brings every worker in, and in again when it is missing
#   node.sh worker HEAD     (on a worker) joins the cluster at the address HEAD, and ends when the node has left it
#   node.sh stop            (on a worker) leaves the cluster
#   node.sh install         what aws.yaml and gcp.yaml do on each node, where Ray's autoscaler brings the workers in:
#   node.sh start OPTIONS   `ray start` with these options
set -euo pipefail
cd ~/.fedray
. ./settings
umask 077
port=6379

# The environment of all Ray processes. Ray would serve its metrics to anyone: -1 is no port. Ray's launcher sets the
# last line's for the head alone.
export RAY_enable_metrics_collection=0 AUTOSCALER_METRIC_PORT=-1 DASHBOARD_METRIC_PORT=-1
export RAY_USAGE_STATS_ENABLED=0 RAY_gcs_rpc_server_reconnect_timeout_s=20
export RAY_JOB_STOP_WAIT_TIME_S=300 # of `ray job stop`, for the round in progress and a checkpoint; by default it is 3
unset RAY_enable_autoscaler_v2 RAY_CLOUD_INSTANCE_ID RAY_NODE_TYPE_NAME OMP_NUM_THREADS PYTHONWARNINGS

fail() { echo "$*" >&2; exit 1; }

quietly() { # runs a command, and shows its output only if it fails
  local output status=0
  output=$("$@" 9>&- 2>&1) || status=$?
  ((status == 0)) || { echo "$output" | tail -n 20 >&2; return "$status"; }
}

patiently() { # the same, with a line each ten seconds
  local log=$RAY_TMPDIR/output second=0
  "$@" > "$log" 2>&1 &
  while kill -0 $! 2> /dev/null; do
    sleep 1
    ((++second % 10)) || echo "  $second s: $(tail -n 1 "$log" | cut -c 1-300)"
  done
  wait $! || { tail -n 20 "$log" >&2; return 1; }
}

setting() { # prints a value of config.yaml, as `ray up` has sent it to the head
  python -c 'import sys, yaml
found = yaml.safe_load(open("../ray_bootstrap_config.yaml"))
for key in sys.argv[1].split("."): found = found[key]
print(*found if isinstance(found, list) else [found])' "$1"
}

make_private() { # Ray lets everybody read and write its folder, so the folder around it keeps the others out
  mkdir -p -m 700 "$RAY_TMPDIR"
  [[ -O $RAY_TMPDIR && ! -L $RAY_TMPDIR ]] || fail "$RAY_TMPDIR on $HOSTNAME is another user's: change RAY_TMPDIR in config.yaml"
  chmod 700 "$RAY_TMPDIR"
}

digest() { # of everything that a running node was started with
  { cat settings; find source cluster/node.sh -type f ! -path '*/__pycache__/*' -print0 | sort -z | xargs -0 sha256sum; } | sha256sum
}

receive() { # puts the code that has come in place of that before, whose files may not exist any more
  [[ -e incoming/pyproject.toml ]] || return 0
  local part
  for part in incoming/*; do
    if ! diff -rq -x __pycache__ "$part" "source/${part#*/}" > /dev/null 2>&1; then
      rm -rf source
      mv incoming source
      return
    fi
  done
  rm -rf incoming # the same: a run may be reading the code that is there
}

installed() { # makes the virtual environment what config.yaml says; pip's further options follow
  if [[ ! -x $venv/bin/python ]]; then
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
      fail "$HOSTNAME: fedray needs Python 3.10 or later, and \`$python\` is none: change it in config.yaml"
    quietly "$python" -m venv "$venv" || fail "$HOSTNAME: \`$python -m venv\` failed"
  fi
  touch source/README.md source/LICENSE # pyproject.toml names them
  [[ -z $install || $(digest) == "$(cat "$venv/fedray-installed" 2> /dev/null)" ]] && return
  # shellcheck disable=SC2086 # several words
  python -m pip install --progress-bar off "$@" $install 9>&- || return
  digest > "$venv/fedray-installed"
}

make_token() { ray get-auth-token --generate && chmod 600 ../.ray/auth_token; } # by itself Ray makes it 644

raylet_of() { pgrep -u $UID -f "raylet/raylet .*--gcs-address=$1:$port( |$)"; }
gcs() { pgrep -u $UID -f "gcs/gcs_server .*--gcs_server_port=$port( |$)"; }

started() { # ray start, with the options that follow
  ulimit -Sn 65536 2> /dev/null || ulimit -Sn "$(ulimit -Hn)"
  cd # jobs begin in the folder in which Ray was started
  quietly ray start --temp-dir="$RAY_TMPDIR/ray" --disable-usage-stats "$@"
  cd ~/.fedray
}

address_for() { # the option with this node's address in the network of another; Ray itself asks the default route
  python -c 'import socket, sys
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
    probe.connect((sys.argv[1], 1))
    print("--node-ip-address=" + probe.getsockname()[0])' "$1" 2> /dev/null || true
}

on_worker() { # on_worker ADDRESS COMMAND: runs it there
  ssh "${ssh_options[@]}" "$user@$1" "$2" < /dev/null
}

bring() { # keeps the worker at this address in the cluster; its last try is in the log
  while true; do
    {
      rsync -a --delete --exclude=__pycache__ -e "ssh ${ssh_options[*]}" settings versions source cluster "$user@$1:.fedray/" &&
        rsync -a --chmod=D700,F600 -e "ssh ${ssh_options[*]}" ../.ray/auth_token "$user@$1:.ray/" &&
        on_worker "$1" "TERM=dumb bash -l .fedray/cluster/node.sh worker $(setting provider.head_ip)"
    } > "$RAY_TMPDIR/workers/$1" 2>&1 || true
    sleep 5
  done
}

stop_workers() {
  local worker
  for worker in $(setting provider.worker_ips); do
    timeout 30 ssh "${ssh_options[@]}" "$user@$worker" 'test ! -e .fedray/cluster/node.sh || bash -l .fedray/cluster/node.sh stop' < /dev/null > /dev/null 2>&1 &
  done
  wait
}

prepare_ssh() {
  user=$(setting auth.ssh_user)
  ssh_options=(-i ~/ray_bootstrap_key.pem -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=5 -o LogLevel=ERROR
    -o StrictHostKeyChecking=accept-new -o UserKnownHostsFile="$HOME/.fedray/known_hosts")
}

case ${1:-} in
install)
  make_private
  patiently installed
  ;;
start)
  make_private
  quietly ray stop
  started "${@:2}"
  ;;
head)
  make_private
  receive
  keeper=$(pgrep -u $UID -o -f '[n]ode.sh keep' || true)
  [[ -z $keeper ]] || kill -- "-$keeper" || true # with its connections; workers do not end with theirs
  if ! gcs > /dev/null || ! raylet_of '[^ ]*' > /dev/null || [[ $(digest) != "$(cat "$RAY_TMPDIR/started" 2> /dev/null)" ]]; then
    if [[ -x $venv/bin/ray ]]; then
      prepare_ssh
      stop_workers
      quietly ray stop
    fi
    echo "installing ..."
    patiently installed
    python -m pip list --format=freeze --exclude fedray > versions
    quietly make_token
    echo "starting Ray ..."
    started --head --port=$port --dashboard-host=127.0.0.1 $(address_for "$(setting provider.head_ip)")
    digest > "$RAY_TMPDIR/started"
  else
    echo "the head runs and is up to date: it goes on"
  fi
  setsid --fork bash cluster/node.sh keep < /dev/null > /dev/null 2>&1
  python - "$RAY_TMPDIR/workers" $(setting provider.worker_ips) <<'END'
import sys, time
from pathlib import Path
import ray

folder, *workers = sys.argv[1:]
address = Path(folder, "../ray/ray_current_cluster").read_text()

def state(worker):  # the last that is known of a worker that is not there yet
    log = Path(folder, worker)
    lines = log.read_text(errors="replace").split("\n") if log.exists() else []
    telling = [line for line in lines if line.strip() and not line.startswith("rsync")]
    return f"{worker}: {telling[-1][:150] if telling else 'starting'}"

try:
    ray.init(address=address, log_to_driver=False, logging_level="error")
    for second in range(900):
        joined = min(sum(node["Alive"] for node in ray.nodes()) - 1, len(workers))
        if second % 10 == 0 or joined >= len(workers):
            here = {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
            print(f"{joined} of {len(workers)} workers joined", flush=True)
            if second:
                print(*(f"  {state(worker)}\n" for worker in workers if worker not in here), sep="", end="", flush=True)
        if joined >= len(workers):
            break
        time.sleep(1)
    else:
        print("going on; the others are tried again and again, and join when they can")
except KeyboardInterrupt:
    pass
END
  ;;
keep)
  prepare_ssh
  mkdir -p "$RAY_TMPDIR/workers"
  head=$(gcs)
  for worker in $(setting provider.worker_ips); do bring "$worker" & done
  tail --pid="$head" -f /dev/null
  # shellcheck disable=SC2046 # one word each
  kill $(jobs -p) || true # `ray down` ends Ray on the head alone
  stop_workers
  kill -- -$$
  ;;
worker)
  make_private
  # The head comes again when the connection was lost; then the one before may still watch over the node.
  exec 9> "$RAY_TMPDIR/lock"
  until flock -w 10 9; do kill -0 $PPID 2> /dev/null || exit 0; done
  head=$(getent ahostsv4 "$2" | awk 'NR == 1 {print $1}') || fail "$HOSTNAME does not know the head's name, $2"
  if ! raylet_of "$head" > /dev/null; then
    timeout 10 bash -c ": < /dev/tcp/$head/$port" 2> /dev/null || fail "$HOSTNAME gets no answer from the head at $2:$port"
    [[ ! -x $venv/bin/ray ]] || quietly ray stop
    installed --constraint versions
    started --address="$head:$port" $(address_for "$head")
  fi
  tail --pid="$(raylet_of "$head")" -f /dev/null 9>&-
  quietly ray stop # a node that has lost its head ends, but for some processes
  ;;
stop)
  pkill -u $UID -f '[n]ode.sh worker' || true
  quietly ray stop
  ;;
*)
  sed -n '2,10s/^# \{0,1\}//p' "$0"
  exit 2
  ;;
esac
