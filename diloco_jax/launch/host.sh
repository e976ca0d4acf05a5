# What every machine does. On a TPU VM, or the coordinator's machine beside it, each boot
# installs it as the service `diloco`; a job of SkyPilot runs `serve` itself. The settings
# in capitals come before this part; they are all that differs.
#
#   journalctl -u diloco       what it says
#   systemctl stop diloco      SIGTERM to `diloco`: it says goodbye
set -Eeuo pipefail
# 2 and 3 are `diloco`'s own: they mean that another attempt will not help.
trap 'exit 1' ERR

boot() {
  mkdir -p "$ROOT"
  cp "$0" "$ROOT/host.sh"
  cat >/etc/systemd/system/diloco.service <<UNIT
[Unit]
Description=diloco $ROLE
After=docker.service network-online.target
Requires=docker.service
[Service]
ExecStart=/bin/bash $ROOT/host.sh serve
TimeoutStopSec=60
UNIT
  systemctl daemon-reload
  # Boots come again, and must not end what runs.
  systemctl start --no-block diloco
}

# `diloco` until it ends for good; then the machine gives itself back, or its job ends.
# Crashes are repeated, with pauses that grow to half an hour in all: the registry or a
# secret may be away for a while. Only progress ends a row of them, not time: a start that
# fails after an hour's copy of the text would be repeated for ever.
serve() {
  local code crashes=0
  prepare
  while true; do
    code=0
    /bin/bash "$0" run || code=$?
    case "$code" in 2 | 3) break ;; esac
    if is_over "$code"; then
      code=0
      break
    fi
    if lasted; then crashes=0; fi
    crashes=$((crashes + 1))
    if [ "$crashes" -ge "$FRUITLESS_STARTS" ]; then
      tell "$crashes starts in a row ended before $LASTED_S s of progress, so $PART is" \
        "given up (placement.fruitless_starts). The last one ended at:" \
        "$(sed 's/ *$//' "$ROOT/begun")"
      code=2
      break
    fi
    sleep "$((10 * crashes))"
  done
  # Another host may have done it already.
  if [ ${#RELEASE[@]} -gt 0 ]; then cloud "${RELEASE[@]}" || true; fi
  exit "$code"
}

# Whether a process that ended so is to start no more. A coordinator that is asked to end,
# as at a reboot, says 0, too.
is_over() {
  if [ "$END" != 0 ] && [ "$(date +%s)" -ge "$END" ]; then return 0; fi
  [ "$1" = 0 ] &&
    { [ "$ROLE" = island ] || grep -Eqs '"phase": ?"done"' "$DISK/run/summary.json"; }
}

# Whether the last start made progress long enough.
lasted() {
  if [ "$ROLE" = island ]; then
    # `diloco` touches it after so long a time of steps.
    [ "$ROOT/run/lasted" -nt "$ROOT/begun" ]
  else
    [ $(($(date +%s) - $(stat -c %Y "$ROOT/begun"))) -ge "$LASTED_S" ] &&
      [ -n "$(find "$DISK/run/publishes" -newer "$ROOT/begun" -print -quit 2>/dev/null)" ]
  fi
}

# Settings of the machine, and the config. Repeating it changes nothing.
prepare() {
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
}

run() {
  local limit=()
  bound_time
  begins "pull of $IMAGE"
  pull
  begins "copy of the certificates from the secret $SECRET"
  certificates
  if [ -n "$DATA" ]; then
    begins "copy of $DATA"
    cloud_into "$ROOT/data" storage rsync --recursive "$DATA" "$ROOT/data"
  fi
  local work="$ROOT/run" environment=("${VARIABLES[@]}") number value
  if [ "$ROLE" = coordinator ]; then
    begins "mount of the disk $DEVICE"
    mount_disk
    begins "entry of $ADDRESS in launch.dns_zone"
    register
    work=$DISK/run
    begins "look into the secret $BEGIN"
    fetch_permit
    if [ -e "$PERMIT" ]; then
      ARGUMENTS+=(--init)
      if [ -n "$SOURCE" ]; then ARGUMENTS+=("$SOURCE"); fi
    fi
  else
    # Pauses lie between starts, so no number is used twice.
    ARGUMENTS+=(--incarnation "$(date +%s)")
    # Without TPUs it fails, and does not train on the CPU.
    environment+=(--env "JAX_PLATFORMS=$PLATFORMS")
  fi
  for ((number = 0; number < ${#SECRETS[@]}; number += 2)); do
    begins "look into the secret ${SECRETS[number + 1]} (launch.secrets)"
    value=$(cloud secrets versions access latest --secret "${SECRETS[number + 1]}" \
      --project "$PROJECT")
    # By name: the value is in no argument and on no disk.
    export "${SECRETS[number]}=$value"
    environment+=(--env "${SECRETS[number]}")
  done
  begins "\`diloco\`, whose own log says why"
  local log=("${CLOUD_LOG[@]}")
  if ! docker run --rm "${log[@]}" --entrypoint true "$IMAGE" >/dev/null 2>&1; then
    log=(--log-driver none)
  fi
  local privileged=()
  if [ "$ROLE" = island ]; then privileged=(--privileged); fi
  # Left by a run that was killed; chips in use by it would keep the next one waiting.
  docker rm --force diloco >/dev/null 2>&1 || true
  if [ -n "$DATA" ]; then
    # So that no start reads it. What is wrong with a file, `diloco` itself tells.
    docker run --rm --name diloco --log-driver none --volume "$ROOT/data:$ROOT/data" \
      "$IMAGE" manifest --missing "$ROOT/data" || true
  fi
  bound_time  # Text was copied meanwhile.
  trap - ERR
  # It holds none of the pipes: who waits for their end waits for the process alone.
  follow_certificates >/dev/null 2>&1 &
  # In the foreground: signals and the exit code pass through.
  exec "${limit[@]}" docker run --rm --name diloco "${privileged[@]}" --network host \
    "${log[@]}" --volume "$ROOT/config:$ROOT/config:ro" \
    --volume "$ROOT/certificates:$ROOT/certificates:ro" \
    --volume "$ROOT/data:$ROOT/data" --volume "$work:$ROOT/run" "${environment[@]}" \
    "$IMAGE" "${ARGUMENTS[@]}"
}

# `timeout` until the end, if one is set.
bound_time() {
  if [ "$END" = 0 ]; then return; fi
  local left=$((END - $(date +%s)))
  if [ "$left" -le 0 ]; then
    echo 'launch.max_hours are over'
    exit 0
  fi
  limit=(timeout --foreground --kill-after=60 "$left")
}

# The image, if it is not there for good already: a digest means one image, a tag may
# have moved. Only Google's registries know the machine's account.
pull() {
  local registry="${IMAGE%%/*}"
  export DOCKER_CONFIG="$ROOT/docker"
  mkdir -p "$DOCKER_CONFIG"
  case "$IMAGE" in
    *@sha256:*) if docker image inspect "$IMAGE" >/dev/null 2>&1; then return; fi ;;
  esac
  case "$registry" in
    *.pkg.dev | gcr.io | *.gcr.io)
      cloud auth print-access-token |
        docker login --username oauth2accesstoken --password-stdin "https://$registry"
      ;;
  esac
  docker pull --quiet "$IMAGE"
}

# This machine's certificates, as they are now. Each is whole at any moment, since a
# process may read it; and new to it, whatever times the archive has.
certificates() {
  local new="$ROOT/certificates.new"
  (
    umask 077
    mkdir -p "$new" &&
      cloud_into "$new" secrets versions access latest --secret "$SECRET" \
        --project "$PROJECT" --out-file "$new/$ROLE.tar" &&
      tar -xmf "$new/$ROLE.tar" -C "$new" &&
      mv "$new"/* "$ROOT/certificates/"
  )
}

# Renewed and revoked certificates reach a process that runs, which reads them again. It
# ends with this shell's process, which becomes `diloco`. The log is of the last time.
follow_certificates() {
  local code
  while true; do
    code=0
    timeout "$FOLLOW_S" tail --pid=$$ --follow /dev/null || code=$?
    # Only after that time; anything else would come at once, and again.
    if [ "$code" != 124 ]; then return; fi
    certificates >"$ROOT/certificates.log" 2>&1 || continue
  done
}

# What the start has come to, and since when. If it ends there, it says so once it is given
# up. The file keeps its size, since a disk that is full, as of text, has no block more.
begins() {
  printf '%-255.255s\n' "$1" 1<>"$ROOT/begun"
}

# To the machine's journal, and to the cloud's log, which outlives the machine.
tell() {
  echo "$*"
  docker run --rm "${CLOUD_LOG[@]}" --entrypoint echo "$CLOUD_IMAGE" "$*" \
    >/dev/null 2>&1 || true
}

# The machine may be a new one, with another address under the same name.
register() {
  if [ -z "$DNS_ZONE" ]; then return; fi
  local verb=create name="$ADDRESS." where=(--zone "$DNS_ZONE" --type A)
  if cloud dns record-sets describe "$name" "${where[@]}" --project "$PROJECT" \
    >/dev/null 2>&1; then verb=update; fi
  cloud dns record-sets "$verb" "$name" "${where[@]}" --project "$PROJECT" --ttl 5 \
    --rrdatas "$(hostname -I | cut -d ' ' -f 1)"
}

# The run may begin on one disk: version 1 of a secret says that no disk may yet, and
# is destroyed as the permit comes to the first one. A disk that got lost is then not
# taken for a new run, however soon or late that is.
fetch_permit() {
  if [ -d "$DISK/run/log" ]; then
    rm -f "$PERMIT" "$PERMIT.new"
    return
  fi
  if [ -e "$PERMIT" ]; then return; fi
  local version=(1 --secret "$BEGIN" --project "$PROJECT") state
  state=$(cloud secrets versions describe "${version[@]}" --format 'value(state)')
  case "$state" in
    [Ee][Nn][Aa][Bb][Ll][Ee][Dd])
      # Here first: cut off between the two, this disk still has it.
      : >"$PERMIT.new"
      sync "$DISK"
      cloud secrets versions destroy "${version[@]}"
      ;;
  esac
  if [ -e "$PERMIT.new" ]; then
    mv "$PERMIT.new" "$PERMIT"
  else
    echo "the run has begun on another disk, and there is nothing of it on this one"
  fi
}

mount_disk() {
  mkdir -p "$DISK"
  if mountpoint -q "$DISK"; then return; fi
  # A blank disk only: blkid knows whatever else there may be on it.
  if ! blkid "$DEVICE" >/dev/null; then mkfs.ext4 -q "$DEVICE"; fi
  mount -o discard "$DEVICE" "$DISK"
}

# `gcloud`, which not every machine has, as the machine's own service account. It sees
# nothing of this machine.
cloud() {
  docker run --rm --network host "$CLOUD_IMAGE" gcloud --quiet "$@"
}

# The same, but it sees, and fills, this one folder.
cloud_into() {
  local folder="$1"
  shift
  docker run --rm --network host --volume "$folder:$folder" "$CLOUD_IMAGE" \
    gcloud --quiet "$@"
}

# Options of `docker run` for the cloud's log. Not every account may write there.
CLOUD_LOG=(--log-driver gcplogs --label "diloco-run=$RUN" --label "diloco-part=$PART"
  --log-opt labels=diloco-run,diloco-part --log-opt "gcp-project=$PROJECT")

"${1:-boot}"
