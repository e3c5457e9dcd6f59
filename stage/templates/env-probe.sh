#!/bin/sh
# Prints the profile of this node: what an environment for it must fit. Copy it back to where environments are locked:
#     sh env-probe.sh > mycluster.yml
#     srun -p gpu --gres=gpu:1 -t 5 sh env-probe.sh > mycluster.yml      (where the login node has no GPU)
# Where python3 has torch (after `module load`, or inside the container), it also prints what that Python provides.
# Needs sh and the usual small tools; no Python, no root, no network. Nothing is installed or changed, and no command
# asked here can hold it up for longer than half a minute.
set -u
LC_ALL=C
export LC_ALL
PATH=$PATH:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin
export PATH
unset CDPATH GREP_OPTIONS POSIXLY_CORRECT # settings of tools whose answers are read here

complain() {
    echo "env-probe: $*" >&2
}

scratch=
for place in "${TMPDIR:-/tmp}" /tmp "${HOME:-/tmp}" .; do
    if (umask 077 && mkdir "$place/env-probe.$$") 2>/dev/null; then
        scratch=$place/env-probe.$$
        break
    fi
done
if [ -z "$scratch" ]; then
    complain "no folder can be written: not \$TMPDIR, /tmp, \$HOME or this one"
    exit 1
fi
trap 'rm -rf "$scratch"' EXIT
trap 'exit 1' HUP INT TERM

# limited NAME SECONDS COMMAND...: the command's output, given up after SECONDS. Not by `wait`, which would itself hang
# on a command that even SIGKILL does not end, as nvidia-smi on a GPU that fell off the bus.
limited() {
    answer=$scratch/$1
    limit=$2
    shift 2
    rm -f "$answer.done"
    (
        "$@" >"$answer" 2>/dev/null </dev/null &
        command=$!
        trap 'kill -9 "$command"; exit 1' TERM
        wait "$command"
        : >"$answer.done"
    ) >/dev/null 2>&1 &
    watcher=$!
    waited=0
    while [ ! -e "$answer.done" ]; do
        if [ "$waited" -ge "$limit" ]; then
            kill "$watcher" 2>/dev/null
            return 1
        fi
        # Parts of a second are beyond POSIX; where sleep refuses them, a second it is.
        if sleep 0.02 2>/dev/null; then ticks=$((${ticks:-0} + 1)); else sleep 1 && ticks=50; fi
        if [ "$ticks" -ge 50 ]; then
            waited=$((waited + 1)) ticks=0
        fi
    done
    cat "$answer"
}

have() {
    command -v "$1" >/dev/null 2>&1
}

# The first thing on stdin that looks like MAJOR.MINOR.
first_version() {
    sed -n 's/^[^0-9]*\([0-9][0-9]*\.[0-9][0-9]*\).*$/\1/p' | sed -n 1p
}

# Text as YAML: in double quotes, without what would end them.
quoted() {
    printf '"%s"' "$(printf '%s' "$1" | tr -d '\\"' | tr -c ' -~' ' ' | sed 's/  */ /g;s/^ //;s/ $//')"
}

platform() {
    case $(uname -m) in
        x86_64 | amd64) echo linux-64 ;;
        aarch64 | arm64) echo linux-aarch64 ;;
    esac
}

glibc() {
    if have getconf; then
        found=$(limited getconf 5 getconf GNU_LIBC_VERSION | sed -n 's/^glibc //p' | first_version)
    fi
    if [ -z "${found:-}" ] && have ldd; then
        # "ldd (GNU libc) 2.28", "ldd (Ubuntu GLIBC 2.35-0ubuntu3.8) 2.35": the last word. musl's says nothing on stdout.
        found=$(limited ldd 5 ldd --version | sed -n 1p | sed 's/^.* //' | first_version)
    fi
    printf '%s' "${found:-}"
}

# The newest CUDA of a driver that does not say it itself. CUDA's release notes, "CUDA Toolkit and Corresponding Driver
# Versions".
cuda_of_driver() {
    case ${1%%.*} in
        45[0-4]) echo 11.0 ;;
        45[5-9]) echo 11.1 ;;
        46[0-4]) echo 11.2 ;;
        46[5-9]) echo 11.3 ;;
        47? | 48?) echo 11.4 ;;
        49?) echo 11.5 ;;
        51[0-4]) echo 11.6 ;;
        51[5-9]) echo 11.7 ;;
        520 | 522) echo 11.8 ;;
        52[5-9]) echo 12.0 ;;
        53[0-4]) echo 12.1 ;;
        53[5-9]) echo 12.2 ;;
        54?) echo 12.3 ;;
        55[0-4]) echo 12.4 ;;
        55[5-9]) echo 12.5 ;;
        56[0-4]) echo 12.6 ;;
        56[5-9]) echo 12.7 ;;
        57[0-4]) echo 12.8 ;;
        57[5-9]) echo 12.9 ;;
        58?) echo 13.0 ;;
        59?) echo 13.1 ;;
    esac
}

# The compute capability of a GPU by its name, for drivers before 510, whose nvidia-smi does not tell.
capability_of_name() {
    case " $(printf '%s' "$1" | tr -- '-_' '  ') " in
        *" K80 "*) echo 3.7 ;;
        *" K40"* | *" K20"*) echo 3.5 ;;
        *" M60 "* | *" M40 "*) echo 5.2 ;;
        *" P100 "*) echo 6.0 ;;
        *" P40 "* | *" P4 "* | *" GTX 10"*) echo 6.1 ;;
        *" V100"* | *" TITAN V "*) echo 7.0 ;;
        *" T4 "* | *" RTX 20"* | *"Quadro RTX "* | *" TITAN RTX "*) echo 7.5 ;;
        *" A100"* | *" A800"* | *" A30 "*) echo 8.0 ;;
        *" A40 "* | *" A10 "* | *" A16 "* | *" A2 "* | *" RTX A"* | *" RTX 30"*) echo 8.6 ;;
        *" L40"* | *" L4 "* | *" RTX 40"* | *" RTX 6000 Ada "*) echo 8.9 ;;
        *" H100"* | *" H200"* | *" H800"* | *" H20 "* | *" GH200"*) echo 9.0 ;;
    esac
}

# A GPU that is not NVIDIA's, by its maker's own tool.
other_gpu() {
    if have rocm-smi; then
        limited rocm 20 rocm-smi --showproductname | sed -n 's/^.*Card [Ss]eries:[[:space:]]*//p' | sed -n 1p
    elif have npu-smi; then
        limited npu 20 npu-smi info | sed -n 's/^| *[0-9][0-9]* *\([0-9][0-9A-Za-z]*\) *| *OK.*$/Ascend \1/p' | sed -n 1p
    elif have xpu-smi; then
        limited xpu 20 xpu-smi discovery | sed -n 's/^.*Device Name: *\([^|]*[^ |]\) *|.*$/\1/p' | sed -n 1p
    fi
}

# Sets gpu, driver, cuda, capability, others (further kinds of GPU on this node), and other (one that is not NVIDIA's).
look_for_gpu() {
    gpu='' driver='' cuda='' capability='' others='' other=''
    # What hangs or fails once is not asked again.
    if have nvidia-smi && said=$(limited smi 20 nvidia-smi); then
        cuda=$(printf '%s\n' "$said" | sed -n 's/^.*CUDA [A-Z ]*Version: *\([0-9][0-9]*\.[0-9][0-9]*\).*$/\1/p' | sed -n 1p)
        rows=$(limited query 20 nvidia-smi --query-gpu=driver_version,compute_cap,name --format=csv,noheader |
            grep '^[0-9][0-9.]*, [0-9]*\.[0-9]*, ' | sort -u)
        if [ -z "$rows" ]; then
            rows=$(limited older 20 nvidia-smi --query-gpu=driver_version,name --format=csv,noheader |
                grep '^[0-9][0-9.]*, ' | sort -u | sed 's/, /, , /')
        fi
        first=$(printf '%s\n' "$rows" | sed -n 1p)
        others=$(printf '%s\n' "$rows" | sed 1d | sed 's/^[^,]*, [^,]*, //' | tr '\n' ';' | sed 's/;$//;s/;/; /g')
        driver=$(printf '%s' "$first" | cut -d, -f1)
        capability=$(printf '%s' "$first" | cut -d, -f2 | tr -d ' ')
        gpu=$(printf '%s' "$first" | cut -d, -f3- | sed 's/^ *//')
        [ -n "$capability" ] || capability=$(capability_of_name "$gpu")
    fi
    if [ -z "$cuda" ] && [ -n "$driver" ]; then
        cuda=$(cuda_of_driver "$driver")
    fi
    [ -n "$gpu" ] || other=$(other_gpu)
}

# What the Python on PATH provides, if it has torch: torch, numpy, NVIDIA's and triton's parts, and what is compiled
# against torch. Nothing else: an old version of the rest would hold everything back. Nothing is imported.
provides() {
    have python3 || return 0
    # shellcheck disable=SC2016
    limited python 30 python3 -s -c '
import os, re, sys
try:
    from importlib.metadata import distributions
except ImportError:  # Python 3.7 or older, for which no environment is made
    distributions = tuple

def name_in(text):
    return re.sub(r"[-_.]+", "-", re.match(r"[\w.-]*", text)[0]).lower()

def requirements(found):  # outside of extras; what needs another machine or Python is left out where packaging is there
    for text in found.requires or ():
        marker = text.partition(";")[2]
        if "extra ==" not in marker and (not marker or applies(marker)):
            yield name_in(text)

def applies(marker):
    for name in ("packaging", "pip._vendor.packaging"):
        try:
            return __import__(name + ".markers", fromlist=["Marker"]).Marker(marker).evaluate()
        except ImportError:
            pass
    return False

def compiled_for_torch(found):
    return "torch" in requirements(found) and any(str(path).endswith(".so") for path in found.files or ())

here = {}
for found in distributions():  # the first of a name is the one that is imported
    here.setdefault(name_in(found.metadata["Name"] or ""), found)
if "torch" not in here:
    print("# %s has no torch. For the site\x27s own: run this after `module load`, or in its container." % sys.executable)
    sys.exit()
if os.path.isdir(os.path.join(sys.prefix, ".airlift")):
    print("# %s is of an environment of airlift: without it, this prints what the site provides." % sys.executable)
    sys.exit()
known = re.compile("torch|numpy|nvidia-.*|triton|pytorch-triton.*")
names = [name for name in sorted(here) if known.fullmatch(name) or compiled_for_torch(here[name])]
print("# The torch of %s, for environments that are to use it:" % sys.executable)
print("provides:\n  python: \"%d.%d.%d\"" % sys.version_info[:3])
for name in sorted(names, key=lambda name: name not in ("torch", "numpy")):
    print("  %s: \"%s\"" % (name, here[name].version))
lacks = [name for name in requirements(here["torch"]) if name not in here]
if lacks:
    words = "# By its metadata this torch needs %s, which %s lacks: load that too, or name it in environment.yml."
    print(words % (", ".join(lacks), sys.executable))
'
}

# "openmpi 4.1.5", from what the mpirun on PATH calls itself.
mpi() {
    have mpirun || return 0
    said=$(limited mpirun 10 mpirun --version | sed -n 1,5p)
    case $said in
        *"Open MPI"*) echo "openmpi $(printf '%s' "$said" | sed -n 's/^.*Open MPI) *//p' | sed -n 1p)" ;;
        *"Intel(R) MPI"*) echo "intel mpi $(printf '%s' "$said" | sed -n 's/^.*Version *\([0-9.]*\).*$/\1/p' | sed -n 1p)" ;;
        *HYDRA*) echo "mpich $(printf '%s' "$said" | sed -n 's/^.*Version: *//p' | sed -n 1p)" ;;
        ?*) printf '%s\n' "$said" | sed -n 1p ;;
    esac
}

# `module` is a function of the login shell; here it is looked for where the two module systems keep it.
available_modules() {
    for init in "${LMOD_PKG:-/nowhere}/init/sh" "${MODULESHOME:-/nowhere}/init/sh" /etc/profile.d/lmod.sh \
        /etc/profile.d/z00_lmod.sh /etc/profile.d/modules.sh /usr/share/lmod/lmod/init/sh /usr/share/modules/init/sh; do
        if [ -r "$init" ]; then
            limited modules 30 sh -c '. "$1" >/dev/null 2>&1; module -t avail 2>&1' probe "$init" |
                grep -i -E '^[a-z0-9._/+-]*(cuda|mpi)[a-z0-9._/+-]*$' | sort -u | sed -n 1,20p | tr '\n' ' '
            return 0
        fi
    done
}

# Partitions that have GPUs: "gpu gpu:a800:8".
gpu_partitions() {
    have sinfo || return 0
    limited sinfo 15 sinfo -h -o '%R %G' | grep 'gpu' | sed 's/([^)]*)//g' | sort -u | sed -n 1,8p
}

say_where_gpus_are() {
    partitions=$(gpu_partitions)
    if [ -n "$partitions" ]; then
        partition=$(printf '%s\n' "$partitions" | sed -n '1s/ .*//p')
        hint="This node has no GPU that answers. Slurm has some: srun -p $partition --gres=gpu:1 -t 5 sh $0"
    else
        hint="This node has no GPU that answers. If others have, run this there."
    fi
    complain "$hint"
    echo "# $hint"
    printf '%s\n' "$partitions" | while read -r partition gres; do
        known=$(capability_of_name "$(printf '%s' "$gres" | tr 'a-z:' 'A-Z ')")
        [ -z "$partition" ] || echo "#   partition $partition $gres${known:+ (compute capability $known)}"
    done
}

# A name for the profile: the GPU's model in small letters (NVIDIA A800-SXM4-80GB: a800), or cpu.
model() {
    printf '%s' "${1:-cpu}" | sed 's/^NVIDIA //;s/^Tesla //;s/^GeForce //;s/^AMD //;s/^Instinct //;s/^Ascend //' |
        tr 'A-Z' 'a-z' | sed 's/[^a-z0-9].*$//'
}

# env-check.sh asks the same questions: it reads this file for its functions.
[ -z "${env_probe_functions:-}" ] || return 0

platform=$(platform)
if [ -z "$platform" ]; then
    complain "$(uname -s) on $(uname -m): environments are made for Linux on x86_64 and aarch64"
    exit 1
fi
glibc=$(glibc)
if [ -z "$glibc" ]; then
    complain "no glibc here (musl?): neither wheels nor conda packages run on this node"
    exit 1
fi
look_for_gpu

echo "# Profile of $(uname -n), by env-probe.sh. What stands in quotes may be corrected by hand."
echo "format: 1"
echo "name: $(quoted "$(model "$gpu$other")")"
echo "platform: $platform"
echo "glibc: \"$glibc\""
echo "linux: \"$(uname -r | first_version)\""
if [ -n "$cuda" ] && [ -n "$capability" ]; then
    echo "cuda: \"$cuda\"                    # driver $driver"
    echo "compute_capability: \"$capability\""
    echo "gpu: $(quoted "$gpu")"
    [ -z "$others" ] || echo "# Other GPUs on this node, each of which wants a profile of its own: $others"
elif [ -n "$gpu" ]; then
    complain "the GPU is $gpu, driver $driver, but its compute capability or the driver's CUDA is not known here"
    echo "# GPU $gpu, driver $driver: fill in what is not known here (developer.nvidia.com/cuda-gpus)."
    echo "# cuda: \"${cuda:-12.2}\""
    echo "# compute_capability: \"${capability:-8.0}\""
elif [ -n "$other" ]; then
    echo "gpu: $(quoted "$other")"
else
    say_where_gpus_are
fi
provides
mpi=$(mpi)
[ -z "$mpi" ] || echo "mpi: $(quoted "$mpi")"
if [ -n "${LOADEDMODULES:-}" ]; then
    echo "modules: [$(printf '%s' "$LOADEDMODULES" | tr -cd 'A-Za-z0-9._/+:-' | sed 's/:/", "/g;s/^/"/;s/$/"/')]"
else
    modules=$(available_modules)
    [ -z "$modules" ] || echo "# Modules here: $modules"
    [ -z "$modules" ] || echo "# modules: [what your jobs load]"
fi
if have sinfo; then
    slurm=$(limited version 10 sinfo -V | sed -n 1p)
    [ -z "$slurm" ] || echo "# $slurm"
fi
