#!/usr/bin/env bash
# usage: scripts/apt-install.sh PART...
# Installs the packages in these parts of scripts/apt-packages.txt that this machine lacks.
set -euo pipefail
cd "$(dirname "$0")/.."
# A new machine may have no Python; python3-venv brings it.
if ! PYTHON=$(scripts/find-python.sh 2>/dev/null); then
  command -v python3 >/dev/null && exec scripts/find-python.sh # says what is wrong with this one
  PYTHON=python3
fi
export PYTHON DEBIAN_FRONTEND=noninteractive

missing=()
while read -r part package unless; do
  [[ " $* " == *" $part "* ]] || continue
  if [[ -n $unless ]] && bash -c "$unless" >/dev/null 2>&1 </dev/null; then continue; fi
  dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q 'ok installed' && continue
  missing+=("$package")
done < <(grep -v '^#' scripts/apt-packages.txt)
[[ ${#missing[@]} -gt 0 ]] || exit 0

if ! command -v apt-get >/dev/null; then
  echo "This machine has no apt-get. Install these packages (Debian's names): ${missing[*]}" >&2
  exit 1
fi
as_root=()
if [[ $(id -u) -ne 0 ]]; then
  if ! command -v sudo >/dev/null; then
    echo "Run as root: apt-get install ${missing[*]}" >&2
    exit 1
  fi
  as_root=(sudo --preserve-env=DEBIAN_FRONTEND)
fi

echo "apt packages: ${missing[*]}"
# By default, Debian also creates and starts a PostgreSQL server.
settings=/etc/postgresql-common/createcluster.conf
if [[ " ${missing[*]} " == *" postgresql "* && ! -e $settings ]]; then
  "${as_root[@]}" mkdir -p "${settings%/*}"
  echo "create_main_cluster = false" | "${as_root[@]}" tee "$settings" >/dev/null
fi
install() {
  "${as_root[@]}" apt-get install -y -q --no-install-recommends \
    -o DPkg::Lock::Timeout=300 -o Dpkg::Use-Pty=0 "${missing[@]}" </dev/null
}
# A new machine has no package lists, an old one has outdated lists: the first try fails on both.
install || { "${as_root[@]}" apt-get update -q && install; }
