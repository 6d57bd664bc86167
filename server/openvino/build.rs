//! Builds the C++ shim against the OpenVINO that `make fetch` unpacks, and tells dependants where its
//! libraries are.

use std::env;
use std::path::PathBuf;

const SOURCES: &[&str] = &[
    "adapt.cpp",
    "attention/before.cpp",
    "attention/dispatch.cpp",
    "attention/op.cpp",
    "attention/run.cpp",
    "attention/try.cpp",
    "compiled.cpp",
    "experts.cpp",
    "gguf.cpp",
    "merge.cpp",
    "paged.cpp",
    "projection/adapters.cpp",
    "projection/chain.cpp",
    "projection/dispatch.cpp",
    "projection/op.cpp",
    "projection/pack.cpp",
    "projection/rewrite.cpp",
    "projection/run.cpp",
    "projection/try.cpp",
    "rotary.cpp",
    "rows.cpp",
    "save.cpp",
    "unpack.cpp",
    "weights.cpp",
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
             (the folder that holds include/ and libs/)",
            needed.display()
        );
    }
    let libraries = libraries.canonicalize().expect("invariant: the folder exists");
    cc::Build::new()
        .cpp(true)
        .std("c++17")
        // As a system folder: the warnings of OpenVINO's headers are not ours.
        .flag(format!("-isystem{}", include.display()))
        .include("shim")
        .files(SOURCES.iter().map(|source| PathBuf::from("shim").join(source)))
        .flag_if_supported("-Wno-deprecated-declarations")
        .opt_level(1)
        .compile("ovfleet_shim");
    kernels();
    println!("cargo:rustc-link-search=native={}", libraries.display());
    println!("cargo:rustc-link-lib=dylib=openvino");
    // What the plugin shares its threads by.
    println!("cargo:rustc-link-lib=dylib:+verbatim=libtbb.so.12");
    println!("cargo:rustc-link-lib=dylib=openvino_gguf_frontend");
    // Our own tests and examples; a dependant's build script does the same for its binaries.
    println!("cargo:rustc-link-arg=-Wl,-rpath,{}", libraries.display());
    println!("cargo:libraries={}", libraries.display());
}

/// Compiles the kernels for each instruction set.
fn kernels() {
    const AVX2: &[&str] = &["-mavx2", "-mfma", "-mf16c"];
    const AVX512: &[&str] = &["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq"];
    const SETS: &[(&str, &str, &[&[&str]])] = &[
        ("attention", "portable", &[]),
        ("attention", "avx2", &[AVX2]),
        ("attention", "avx512", &[AVX2, AVX512]),
        ("attention", "avx512_bf16", &[AVX2, AVX512, &["-mavx512bf16"]]),
        ("projection", "portable", &[]),
        ("projection", "avx2", &[AVX2]),
        ("projection", "avx_vnni", &[AVX2, &["-mavxvnni"]]),
        ("projection", "avx512_vnni", &[AVX2, AVX512, &["-mavx512vnni"]]),
    ];
    let is_x86 = env::var("CARGO_CFG_TARGET_ARCH").is_ok_and(|arch| arch == "x86_64");
    for (folder, set, flags) in SETS.iter().filter(|(_, _, flags)| is_x86 || flags.is_empty()) {
        let mut build = cc::Build::new();
        flags.iter().flat_map(|flags| flags.iter()).for_each(|flag| _ = build.flag(flag));
        build
            .cpp(true)
            .std("c++17")
            .file(format!("shim/{folder}/kernels.cpp"))
            .define("OVFLEET_KERNELS", format!("kernels_{set}").as_str())
            // What the instructions' own headers do is not ours.
            .flag_if_supported("-Wno-uninitialized")
            .flag_if_supported("-Wno-maybe-uninitialized")
            .opt_level(3)
            .compile(&format!("ovfleet_{folder}_{set}"));
    }
}
