#!/usr/bin/env bash
# usage: scripts/fresh.sh [COMMAND]
# Runs what the README promises on a fresh machine: a minimal Debian 12 in a folder, which has nothing
# but git and make, and an empty environment. It clones this checkout's last commit into /root, runs
# COMMAND there (default: make mnist && make test), and removes the folder. Needs root.
#   TFDIST_FRESH      the new folder is made in this one (default: /var/tmp); 12 GB
#   TFDIST_MNIST, TFDIST_CRAN   as in CONTRIBUTING.md; files are visible there under the same path
set -euo pipefail
cd "$(dirname "$0")/.."
command=${1:-make mnist && make test}
[[ $(id -u) -eq 0 ]] || { echo "Run as root: sudo make fresh" >&2; exit 1; }
scripts/apt-install.sh fresh
# A folder of its own, because it is removed at the end.
folder=$(mktemp -d "$(realpath "${TFDIST_FRESH:-/var/tmp}")/tfdist-fresh-XXXXXX")
chmod 755 "$folder" # the root of all users
# All mounts are in a namespace of their own, and so are all processes, which end with the first one.
child=
trap '[[ -z $child ]] || { kill -KILL "$child"; wait "$child"; } 2>/dev/null || true
  rm -rf --one-file-system "$folder" "$folder.log"' EXIT

debootstrap --variant=minbase --include=ca-certificates,git,make bookworm "$folder" \
  >"$folder.log" 2>&1 || {
  tail -20 "$folder.log" >&2
  echo "debootstrap failed: is Debian's mirror reachable?" >&2
  exit 1
}
# How to reach the indexes: names, and certificates of a proxy.
cp --dereference /etc/resolv.conf /etc/hosts "$folder/etc/"
cp /etc/ssl/certs/ca-certificates.crt "$folder/usr/local/share/ca-certificates/host.crt"
chroot "$folder" update-ca-certificates >/dev/null 2>&1
git clone --quiet --no-hardlinks . "$folder/root/tfdist"

visible=() cran=${TFDIST_CRAN:-}
mnist=${TFDIST_MNIST:+$(realpath "$TFDIST_MNIST")}
for place in "$mnist" "${cran#file://}"; do
  if [[ -e $place ]]; then visible+=("$place"); fi
done
# The folder becomes the root of a file system, without which `ip netns exec` fails.
unshare --mount --pid --fork --kill-child bash -euc '
  folder=$1 command=$2 mnist=$3 cran=$4
  shift 4
  mount --make-rprivate /
  mount --bind "$folder" "$folder"
  cd "$folder"
  mount -t proc proc "$folder/proc"
  mount --rbind /sys "$folder/sys"
  mount --rbind /dev "$folder/dev"
  for place; do
    if [[ -d $place ]]; then mkdir -p "$folder$place"; else
      mkdir -p "$folder${place%/*}" && touch "$folder$place"
    fi
    mount --bind -o ro "$place" "$folder$place"
  done
  # Not chroot: a process that enters another namespace would see the whole machine.
  mkdir -p outside
  pivot_root . outside
  cd /
  umount --lazy /outside
  rmdir /outside
  proxies=()
  for name in http_proxy https_proxy no_proxy; do
    if [[ -n ${!name:-} ]]; then proxies+=("$name=${!name}"); fi
  done
  exec /usr/bin/env -i "${proxies[@]}" HOME=/root PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    ${mnist:+TFDIST_MNIST="$mnist"} ${cran:+TFDIST_CRAN="$cran"} \
    bash -c "cd /root/tfdist && $command" </dev/null
' bash "$folder" "$command" "$mnist" "$cran" "${visible[@]}" &
child=$!
wait "$child"
