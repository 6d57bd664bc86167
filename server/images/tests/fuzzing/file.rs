//! Checks how the crate handles arbitrary bytes as an image file. The fuzz target `image` and the test `fuzzing` share
//! these checks.

use std::fs;
use std::path::PathBuf;
use std::sync::LazyLock;

use serde_json::Value;
use server_images::{DecodeLimits, Detail, ImageHeader, ImageProcessor, ModelFamily, decode};

/// Small limits, so that each check is fast.
const LIMITS: DecodeLimits = DecodeLimits { file_bytes_max: 1 << 16, pixels_max: 60_000, side_max: 2000 };

static PROCESSORS: LazyLock<Vec<ImageProcessor>> = LazyLock::new(|| {
    let directory = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    // The fuzz target is compiled in another package, `server/fuzz`, so its `CARGO_MANIFEST_DIR` is different.
    let directory = [directory.join("tests/reference"), directory.join("../images/tests/reference")];
    let directory = directory.into_iter().find(|directory| directory.is_dir()).expect("the directory exists");
    let processor = |family: ModelFamily| {
        let text = fs::read_to_string(directory.join(format!("{family}.json"))).expect("the file exists");
        let reference: Value = serde_json::from_str(&text).expect("the reference is JSON");
        ImageProcessor::from_values(reference["config"].clone(), reference["preprocessor_config"].clone())
            .expect("the configuration is valid")
    };
    ModelFamily::ALL.map(processor).into_iter().collect()
});

/// Checks that the bytes are rejected, or decode to an image of the size in the header. For each processor, `layout`
/// and `preprocess` must either both accept this image or both reject it with the same error, and the inputs must take
/// the memory that the layout states.
///
/// # Panics
/// Panics if a check fails.
pub(crate) fn check(bytes: &[u8]) {
    let header = ImageHeader::read(bytes);
    let image = match decode(bytes, &LIMITS) {
        Ok(image) => image,
        Err(error) => return assert!(!error.to_string().is_empty()),
    };
    assert_eq!(header.expect("the header of a decoded image is valid").size(), image.size());
    for processor in &*PROCESSORS {
        for detail in [Detail::Auto, Detail::Low] {
            let layout = processor.layout(image.size(), detail);
            let inputs = processor.preprocess(&image, detail);
            match (layout, inputs) {
                (Ok(layout), Ok(inputs)) => {
                    assert!(layout.num_tokens > 0);
                    assert_eq!(layout.input_bytes, inputs.size_bytes(), "{}", processor.family());
                }
                (Err(layout), Err(inputs)) => assert_eq!(layout, inputs),
                (layout, inputs) => panic!("{}: {layout:?}, {:?}", processor.family(), inputs.err()),
            }
        }
    }
}
