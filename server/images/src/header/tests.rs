use super::*;

/// A JPEG file up to its frame header, with the EXIF metadata `exif` unless `exif` is empty.
fn jpeg(exif: &[u8]) -> Vec<u8> {
    let mut bytes = b"\xff\xd8\xff\xe0\0\x04\0\0".to_vec();
    if !exif.is_empty() {
        bytes.extend([0xff, 0xff, 0xe1]);
        bytes.extend((exif.len() as u16 + 8).to_be_bytes());
        bytes.extend(b"Exif\0\0");
        bytes.extend(exif);
    }
    bytes.extend(b"\xff\xc2\0\x0b\x08\0\x14\0\x1e\x01\0\0\0");
    bytes
}

fn tiff(order: &[u8; 2], value: u16) -> Vec<u8> {
    let little = order == b"II";
    let u16 = |value: u16| if little { value.to_le_bytes() } else { value.to_be_bytes() };
    let u32 = |value: u32| if little { value.to_le_bytes() } else { value.to_be_bytes() };
    let mut bytes = order.to_vec();
    bytes.extend(u16(42));
    bytes.extend(u32(8));
    bytes.extend(u16(2));
    for [tag, value] in [[0x0100, 7], [0x0112, value]] {
        bytes.extend(u16(tag));
        bytes.extend(u16(3));
        bytes.extend(u32(1));
        bytes.extend(u16(value));
        bytes.extend(u16(0));
    }
    bytes
}

#[test]
fn the_orientation_of_a_jpeg_swaps_the_sides() {
    for order in [b"II", b"MM"] {
        for (value, size) in [(1, Size::new(30, 20)), (3, Size::new(30, 20)), (6, Size::new(20, 30))] {
            let header = ImageHeader::read(&jpeg(&tiff(order, value))).unwrap();
            assert_eq!(header.orientation, Orientation::from_exif(value).unwrap());
            assert_eq!(header.stored_size, Size::new(30, 20));
            assert_eq!(header.size(), size);
        }
    }
}

#[test]
fn invalid_exif_metadata_is_ignored() {
    let valid = tiff(b"II", 6);
    for exif in [&valid[..valid.len() - 5], b"II*\0\xff\xff\xff\xff", &tiff(b"II", 9)] {
        let header = ImageHeader::read(&jpeg(exif)).unwrap();
        assert_eq!(header.orientation, Orientation::Upright);
        assert_eq!(header.size(), Size::new(30, 20));
    }
}

#[test]
fn a_prefix_without_the_size_is_an_error() {
    let whole = jpeg(&[]);
    for length in 3..whole.len() - 4 {
        let error = ImageHeader::read(&whole[..length]).unwrap_err();
        assert_eq!(error.to_string(), "the JPEG image cannot be decoded: the header contains no valid size");
    }
}

#[test]
fn other_files_are_not_supported() {
    for bytes in [&b""[..], b"<svg/>", b"RIFF\0\0\0\0WAVE", b"\x89PNG"] {
        assert_eq!(ImageHeader::read(bytes), Err(ImageError::Format));
    }
}

#[test]
fn every_orientation_moves_pixels_like_pillow() {
    // Two rows of three pixels, numbered by their red values.
    let pixels = (1..=6).flat_map(|number| [number, 0, 0]).collect();
    let image = RgbImage::new(Size::new(3, 2), pixels).unwrap();
    let expected: [(u16, &[u8]); 8] = [
        (1, &[1, 2, 3, 4, 5, 6]),
        (2, &[3, 2, 1, 6, 5, 4]),
        (3, &[6, 5, 4, 3, 2, 1]),
        (4, &[4, 5, 6, 1, 2, 3]),
        (5, &[1, 4, 2, 5, 3, 6]),
        (6, &[4, 1, 5, 2, 6, 3]),
        (7, &[6, 3, 5, 2, 4, 1]),
        (8, &[3, 6, 2, 5, 1, 4]),
    ];
    for (value, numbers) in expected {
        let turned = Orientation::from_exif(value).unwrap().apply(image.clone());
        let found: Vec<u8> = turned.pixels().iter().copied().step_by(3).collect();
        assert_eq!(found, numbers, "EXIF value {value}");
        assert_eq!(turned.size(), if value > 4 { Size::new(2, 3) } else { Size::new(3, 2) });
    }
}
