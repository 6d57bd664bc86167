//! Lets the binary find the OpenVINO libraries: where they were when it was built, or in `lib/` next to its
//! own directory, as in the image.

fn main() {
    if let Ok(libraries) = std::env::var("DEP_OVFLEET_SHIM_LIBRARIES") {
        println!("cargo:rustc-link-arg=-Wl,-rpath,$ORIGIN/../lib:{libraries}");
    }
}
