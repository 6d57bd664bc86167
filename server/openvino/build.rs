//! Builds the C++ shim against an OpenVINO package: the one that `make fetch` unpacks, or that in the directory
//! `OVFLEET_OPENVINO`. Passes the path of the package's libraries to dependents.

use std::env;
use std::fs;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

/// The sources of the shim, except the kernels. The sources of each list are compiled as one translation unit, because
/// OpenVINO's headers take longer to compile than most of the sources. Sources that define the same names are in
/// different lists.
const UNITS: &[(&str, &[&str])] = &[
    (
        "attention",
        &[
            "attention/kernels/dispatch.cpp",
            "attention/op.cpp",
            "attention/rope_fusion.cpp",
            "attention/run.cpp",
            "attention/step_view.cpp",
            "attention/test.cpp",
        ],
    ),
    ("encoder_attention", &["attention/encoder_op.cpp"]),
    ("experts", &["experts/op.cpp", "experts/rewrite.cpp", "experts/run.cpp"]),
    (
        "graph",
        &[
            "graph/adapters.cpp",
            "graph/compiled.cpp",
            "graph/deferred.cpp",
            "graph/experts.cpp",
            "graph/gguf.cpp",
            "graph/kernel_plan.cpp",
            "graph/length_conditions.cpp",
            "graph/logits.cpp",
            "graph/merge.cpp",
            "graph/paged.cpp",
            "graph/patches.cpp",
            "graph/rotary.cpp",
            "graph/save.cpp",
            "graph/weights.cpp",
            "graph/windows.cpp",
        ],
    ),
    (
        "projection",
        &[
            "projection/adapters.cpp",
            "projection/fuse_stages.cpp",
            "projection/kernels/dispatch.cpp",
            "projection/op.cpp",
            "projection/pack.cpp",
            "projection/rewrite.cpp",
            "projection/run.cpp",
            "projection/test.cpp",
        ],
    ),
    ("threads", &["isa.cpp", "test_threads.cpp", "thread_groups.cpp"]),
];

fn main() {
    println!("cargo:rerun-if-env-changed=OVFLEET_OPENVINO");
    println!("cargo:rerun-if-changed=shim");
    let root = env::var_os("OVFLEET_OPENVINO").map_or_else(
        || PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../.deps/openvino"),
        PathBuf::from,
    );
    let libraries = root.join("libs");
    let (include, library) = (root.join("include"), libraries.join("libopenvino.so"));
    for needed in [&include, &library] {
        assert!(
            needed.exists(),
            "{} is missing: run `make fetch`, or set OVFLEET_OPENVINO to an unpacked OpenVINO package \
             (the directory that holds include/ and libs/)",
            needed.display()
        );
    }
    let libraries = libraries.canonicalize().expect("invariant: the directory exists");
    let mut shim = cc::Build::new();
    if !has_tile_models() {
        shim.define("OVFLEET_WITHOUT_TILE_MODELS", None);
    }
    shim.cpp(true)
        .std("c++17")
        // The compiler suppresses warnings in headers of system directories.
        .flag(format!("-isystem{}", include.display()))
        .include("shim")
        .files(UNITS.iter().map(|(name, sources)| write_unit(name, sources)))
        .flag_if_supported("-Wno-deprecated-declarations")
        .opt_level(1);
    let libraries_of_shim = std::iter::once(("ovfleet_shim".to_owned(), shim)).chain(kernels()).collect();
    compile(libraries_of_shim, &shared_directory(&libraries));
    println!("cargo:rustc-link-search=native={}", libraries.display());
    println!("cargo:rustc-link-lib=dylib=openvino");
    // Link TBB, the threading library of the plugin, because the native kernels run on the plugin's threads.
    println!("cargo:rustc-link-lib=dylib:+verbatim=libtbb.so.12");
    println!("cargo:rustc-link-lib=dylib=openvino_gguf_frontend");
    // This argument is for the tests and examples of this crate. The build scripts of dependents set it for their
    // binaries.
    println!("cargo:rustc-link-arg=-Wl,-rpath,{}", libraries.display());
    println!("cargo:libraries={}", libraries.display());
}

/// Writes a source file that includes other source files, and returns its path.
fn write_unit(name: &str, sources: &[&str]) -> PathBuf {
    let includes: String = sources.iter().map(|source| format!("#include \"{source}\"\n")).collect();
    let path = PathBuf::from(env::var_os("OUT_DIR").expect("Cargo sets OUT_DIR")).join(format!("{name}.cpp"));
    fs::write(&path, includes).expect("failed to write a source file");
    path
}

/// Whether to compile the kernels that run on a C++ model of the tile registers. Only tests use them, and Cargo sets
/// PROFILE to `debug` when it builds tests without `--release`.
fn has_tile_models() -> bool {
    env::var("PROFILE").is_ok_and(|profile| profile == "debug")
}

/// A source file of kernels that is compiled for an instruction set.
struct KernelSet {
    directory: &'static str,
    source: &'static str,
    /// The suffix of the name of the kernel table.
    name: &'static str,
    flags: &'static [&'static [&'static str]],
}

/// Returns the directory for the compiled libraries. Its name is a hash of the sources, the compiler settings and the
/// version of OpenVINO. The directory is not in `OUT_DIR`, because Cargo runs this script once more for Clippy, with
/// another `OUT_DIR`, and compiling the libraries takes minutes.
fn shared_directory(openvino: &Path) -> PathBuf {
    let mut hash = DefaultHasher::new();
    (openvino, env::var_os("PROFILE"), include_str!("build.rs")).hash(&mut hash);
    (env::var_os("CXX"), env::var_os("CXXFLAGS")).hash(&mut hash);
    // The stamp identifies the version of the OpenVINO package.
    fs::read(openvino.with_file_name(".stamp")).ok().hash(&mut hash);
    let mut directories = vec![PathBuf::from("shim")];
    let mut files = Vec::new();
    while let Some(directory) = directories.pop() {
        for entry in fs::read_dir(&directory).expect("invariant: the directory exists") {
            let path = entry.expect("failed to read a directory").path();
            if path.is_dir() { directories.push(path) } else { files.push(path) }
        }
    }
    files.sort();
    for path in files {
        (&path, fs::read(&path).expect("failed to read a source file")).hash(&mut hash);
    }
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("Cargo sets OUT_DIR"));
    // OUT_DIR is target/PROFILE/build/PACKAGE/out.
    let target = out.ancestors().nth(3).expect("invariant: OUT_DIR is in the target directory");
    target.join("shim").join(format!("{:016x}", hash.finish()))
}

/// Compiles libraries into `directory`, with as many parallel jobs as Cargo allows, and links them in the given order.
/// If the directory exists, they are already compiled.
fn compile(mut libraries: Vec<(String, cc::Build)>, directory: &Path) {
    let partial = directory.with_extension("partial");
    if !directory.exists() {
        remove_oldest(directory.parent().expect("invariant: the directory has a parent"));
        drop(fs::remove_dir_all(&partial));
        compile_to(&mut libraries, &partial);
        fs::rename(&partial, directory).expect("failed to rename the directory of the libraries");
    }
    println!("cargo:rustc-env=OVFLEET_SHIM={}", directory.display());
    for (name, _) in &libraries {
        println!("cargo:rustc-link-search=native={}", directory.join(name).display());
        println!("cargo:rustc-link-lib=static={name}");
    }
    println!("cargo:rustc-link-lib=stdc++");
}

/// Removes the compiled libraries of old versions. The libraries of the latest versions remain, because Cargo may still
/// link them without running this script again, for example after an environment variable has changed back.
fn remove_oldest(directories: &Path) {
    const RETAINED: usize = 3;
    let mut versions: Vec<_> = fs::read_dir(directories)
        .into_iter()
        .flatten()
        .filter_map(|entry| entry.and_then(|entry| Ok((entry.metadata()?.modified()?, entry.path()))).ok())
        .collect();
    versions.sort();
    for (_, directory) in versions.iter().rev().skip(RETAINED) {
        drop(fs::remove_dir_all(directory));
    }
}

/// Compiles libraries into `directory`.
fn compile_to(libraries: &mut [(String, cc::Build)], directory: &Path) {
    let jobs = env::var("NUM_JOBS").ok().and_then(|jobs| jobs.parse().ok()).unwrap_or(1);
    let next = AtomicUsize::new(0);
    for (name, library) in libraries.iter_mut() {
        // Each library has its own directory, so that object files of the same source file do not overwrite each other.
        // The caller prints the metadata for Cargo, because the threads would print it in an arbitrary order.
        library.out_dir(directory.join(name)).cargo_metadata(false);
        // Generate only line tables, as for the Rust code: with full debug information, compiling takes 1.5 times as
        // long.
        library.debug(false).flag("-g1");
    }
    std::thread::scope(|scope| {
        for _ in 0..jobs {
            scope.spawn(|| {
                while let Some((name, library)) = libraries.get(next.fetch_add(1, Ordering::Relaxed)) {
                    library.compile(name);
                }
            });
        }
    });
}

/// Returns the libraries with the kernels for each instruction set. `shim/README.md` describes how to add an
/// instruction set.
fn kernels() -> Vec<(String, cc::Build)> {
    const AVX2: &[&str] = &["-mavx2", "-mfma", "-mf16c"];
    const AVX512: &[&str] = &["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq"];
    /// `TILES` selects the tile registers of AMX. `TILE_MODEL` selects a model of them in plain C++, for tests.
    const TILES: &[&str] = &["-DOVFLEET_TILES=HardwareTiles"];
    const TILE_MODEL: &[&str] = &["-DOVFLEET_TILES=ModelTiles"];
    /// Prevents the compiler from fusing operations, because the attention kernels specify explicitly which ones are
    /// fused: see attention/kernels/kernels.cpp.
    const EXACT: &[&str] = &["-ffp-contract=off"];
    const fn set(
        directory: &'static str,
        source: &'static str,
        name: &'static str,
        flags: &'static [&'static [&'static str]],
    ) -> KernelSet {
        KernelSet { directory, source, name, flags }
    }
    const SETS: &[KernelSet] = &[
        set("attention", "kernels", "portable", &[EXACT]),
        set("attention", "kernels", "avx2", &[EXACT, AVX2]),
        set("attention", "kernels", "avx512", &[EXACT, AVX2, AVX512]),
        set("attention", "kernels", "avx512_bf16", &[EXACT, AVX2, AVX512, &["-mavx512bf16"]]),
        set("attention", "kernels", "amx", &[TILES, EXACT, AVX2, AVX512]),
        set("attention", "kernels", "tile_model_portable", &[TILE_MODEL, EXACT]),
        set("attention", "kernels", "tile_model_avx512", &[TILE_MODEL, EXACT, AVX2, AVX512]),
        set("projection", "kernels", "portable", &[]),
        set("projection", "kernels", "avx2", &[AVX2]),
        set("projection", "kernels", "avx_vnni", &[AVX2, &["-mavxvnni"]]),
        set("projection", "kernels", "avx512_vnni", &[AVX2, AVX512, &["-mavx512vnni"]]),
        set("projection", "amx", "amx", &[TILES, AVX2, AVX512]),
        set("projection", "amx", "tile_model_portable", &[TILE_MODEL]),
        set("projection", "amx", "tile_model_avx512", &[TILE_MODEL, AVX2, AVX512]),
    ];
    let mut libraries = Vec::new();
    let is_x86 = env::var("CARGO_CFG_TARGET_ARCH").is_ok_and(|arch| arch == "x86_64");
    for KernelSet { directory, source, name, flags } in SETS {
        let mut flags = flags.iter().flat_map(|flags| flags.iter());
        let is_for_another_processor = !is_x86 && flags.clone().any(|flag| flag.starts_with("-m"));
        if is_for_another_processor || (name.starts_with("tile_model") && !has_tile_models()) {
            continue;
        }
        let mut build = cc::Build::new();
        flags.by_ref().for_each(|flag| _ = build.flag(flag));
        build
            .cpp(true)
            .std("c++17")
            .file(format!("shim/{directory}/kernels/{source}.cpp"))
            .define("OVFLEET_KERNELS", format!("kernels_{name}").as_str())
            // Cleanup code for exceptions would define external symbols, which `src/native_tests/symbols.rs` rejects.
            .flag("-fno-exceptions")
            // The compiler's intrinsics headers cause these warnings.
            .flag_if_supported("-Wno-uninitialized")
            .flag_if_supported("-Wno-maybe-uninitialized")
            // Servers have AVX2, so optimizing the portable kernels further is not worth a third of the compile time.
            .opt_level(if name.ends_with("portable") { 2 } else { 3 });
        libraries.push((format!("ovfleet_{directory}_{name}"), build));
    }
    libraries
}
