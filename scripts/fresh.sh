#!/usr/bin/env bash
# usage: scripts/fresh.sh [COMMAND]
# Runs what the README promises on a fresh machine: a minimal Debian 12 in a folder, which has nothing
# but git and make, and an empty environment. It clones this checkout's last commit into /root, runs
# COMMAND there (default: make mnist && make test), and removes the folder. Needs root.
#   TFDIST_FRESH      folder (default: a new one in /var/tmp); 12 GB
#   TFDIST_MNIST, TFDIST_CRAN   as in CONTRIBUTING.md; files are visible there under the same path
set -euo pipefail
cd "$(dirname "$0")/.."
command=${1:-make mnist && make test}
[[ $(id -u) -eq 0 ]] || { echo "Run as root: sudo make fresh" >&2; exit 1; }
scripts/apt-install.sh fresh
folder=${TFDIST_FRESH:-$(mktemp -d /var/tmp/tfdist-fresh-XXXXXX)}
mkdir -p "$folder" && chmod 755 "$folder" # the root of all users
# All mounts are in a namespace of their own, and so are all processes: nothing of them outlives it.
trap 'rm -rf --one-file-system "$folder"' EXIT

debootstrap --variant=minbase --include=ca-certificates,git,make bookworm "$folder" \
  >"$folder.log" 2>&1 || {
  tail -3 "$folder.log" >&2
  echo "debootstrap failed: is Debian's mirror reachable? $folder.log has its output" >&2
  exit 1
}
rm "$folder.log"
# How to reach the indexes: names, and certificates of a proxy.
cp --dereference /etc/resolv.conf /etc/hosts "$folder/etc/"
cp /etc/ssl/certs/ca-certificates.crt "$folder/usr/local/share/ca-certificates/host.crt"
chroot "$folder" update-ca-certificates >/dev/null 2>&1
git clone --quiet --no-hardlinks . "$folder/root/tfdist"

visible=() cran=${TFDIST_CRAN:-}
for place in "${TFDIST_MNIST:-}" "${cran#file://}"; do
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
  exec /usr/bin/env -i HOME=/root PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    ${mnist:+TFDIST_MNIST="$mnist"} ${cran:+TFDIST_CRAN="$cran"} \
    bash -c "cd /root/tfdist && $command" </dev/null
' bash "$folder" "$command" "${TFDIST_MNIST:-}" "$cran" "${visible[@]}"
