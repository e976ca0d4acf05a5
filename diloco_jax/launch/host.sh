# What every machine does: at each boot, as root, it installs itself as the service
# `diloco`; the service runs it again, and then becomes `diloco` in its container. The
# settings in capitals come before this part; they are all that differs.
#
#   journalctl -u diloco       what it says
#   systemctl stop diloco      SIGTERM to `diloco`: it says goodbye
set -Eeuo pipefail
# 2 and 3 are `diloco`'s own: they mean that another attempt will not help.
trap 'exit 1' ERR

boot() {
  # JAX on TPUs asks for it: starting and stopping are much faster.
  if [ "$ROLE" = island ]; then
    echo always >/sys/kernel/mm/transparent_hugepage/enabled
  else
    # Container-Optimized OS lets in nothing but SSH.
    for port in $PORTS; do
      iptables --wait --insert INPUT --protocol tcp --dport "$port" --jump ACCEPT
    done
  fi
  # A connection carries its window per round trip: 64 MiB are 5 Gbit/s over 100 ms.
  sysctl -qw net.core.rmem_max=67108864 net.core.wmem_max=67108864 \
    net.ipv4.tcp_rmem="4096 131072 67108864" net.ipv4.tcp_wmem="4096 65536 67108864" \
    net.ipv4.tcp_slow_start_after_idle=0
  mkdir -p "$ROOT/config" "$ROOT/certificates" "$ROOT/data" "$ROOT/run"
  printf '%s\n' "$CONFIG_JSON" >"$ROOT/config/config.json"
  cp "$0" "$ROOT/host.sh"
  cat >/etc/systemd/system/diloco.service <<UNIT
[Unit]
Description=diloco $ROLE
After=docker.service network-online.target
Requires=docker.service
StartLimitIntervalSec=0
[Service]
ExecStart=/bin/bash $ROOT/host.sh run
Restart=on-failure
RestartSec=10
RestartPreventExitStatus=2 3
TimeoutStopSec=60
UNIT
  systemctl daemon-reload
  # Boots come again, and must not end what runs.
  systemctl start --no-block diloco
}

run() {
  export DOCKER_CONFIG="$ROOT/docker"
  mkdir -p "$DOCKER_CONFIG"
  cloud auth print-access-token |
    docker login --username oauth2accesstoken --password-stdin "https://${IMAGE%%/*}"
  docker pull --quiet "$IMAGE"
  (
    umask 077
    cloud secrets versions access latest --secret "$SECRET" --project "$PROJECT" \
      --out-file "$ROOT/certificates/$ROLE.tar"
    tar -xf "$ROOT/certificates/$ROLE.tar" -C "$ROOT/certificates"
  )
  if [ -n "$DATA" ]; then
    cloud storage rsync --recursive "$DATA" "$ROOT/data"
  fi
  local work="$ROOT/run" environment=("${VARIABLES[@]}") number value
  if [ "$ROLE" = coordinator ]; then
    mount_disk
    work=$DISK/run
    if [ ! -d "$work/log" ] && [ "$(date +%s)" -lt "$INIT_BEFORE" ]; then
      ARGUMENTS+=(--init)
      if [ -n "$SOURCE" ]; then ARGUMENTS+=("$SOURCE"); fi
    fi
  else
    # Counted on disk before it is used: no number is used twice, and a slice made
    # anew begins above all that were.
    local attempt
    attempt=$(($(cat "$ROOT/attempt" 2>/dev/null || echo -1) + 1))
    echo "$attempt" >"$ROOT/attempt"
    ARGUMENTS+=(--incarnation "$((FIRST_INCARNATION + attempt))")
    # Without TPUs it fails, and does not train on the CPU.
    environment+=(--env "JAX_PLATFORMS=$PLATFORMS")
  fi
  for ((number = 0; number < ${#SECRETS[@]}; number += 2)); do
    value=$(cloud secrets versions access latest --secret "${SECRETS[number + 1]}" \
      --project "$PROJECT")
    # By name: the value is in no argument and on no disk.
    export "${SECRETS[number]}=$value"
    environment+=(--env "${SECRETS[number]}")
  done
  # Left by a run that was killed; chips in use by it would keep the next one waiting.
  docker rm --force diloco >/dev/null 2>&1 || true
  if [ -n "$DATA" ]; then
    # So that no start reads it. What is wrong with a file, `diloco` itself tells.
    docker run --rm --name diloco --log-driver none --volume "$ROOT:$ROOT" "$IMAGE" \
      manifest --missing "$ROOT/data" || true
  fi
  trap - ERR
  # In the foreground: signals and the exit code pass through.
  exec docker run --rm --name diloco --privileged --network host --log-driver none \
    --volume "$ROOT:$ROOT" --volume "$work:$ROOT/run" "${environment[@]}" \
    "$IMAGE" "${ARGUMENTS[@]}"
}

mount_disk() {
  mkdir -p "$DISK"
  if mountpoint -q "$DISK"; then return; fi
  # A blank disk only: blkid knows whatever else there may be on it.
  if ! blkid "$DEVICE" >/dev/null; then mkfs.ext4 -q "$DEVICE"; fi
  mount -o discard "$DEVICE" "$DISK"
}

# `gcloud`, which not every machine has, as the machine's own service account.
cloud() {
  docker run --rm --network host --volume "$ROOT:$ROOT" "$CLOUD_IMAGE" \
    gcloud --quiet "$@"
}

"${1:-boot}"
