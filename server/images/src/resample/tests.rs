use super::*;

/// A picture with pseudorandom pixel values.
fn picture(size: Size) -> RgbImage {
    let value = |index: u64| ((index * 2_654_435_761) >> 13) as u8;
    RgbImage::new(size, (0..size.pixels() * 3).map(value).collect()).unwrap()
}

const FILTERS: [Filter; 3] = [Filter::Bilinear, Filter::Bicubic, Filter::Lanczos];

#[test]
fn the_same_size_changes_nothing() {
    let image = picture(Size::new(17, 9));
    for filter in FILTERS {
        assert_eq!(resize(&image, image.size(), filter), image, "{filter:?}");
    }
}

#[test]
fn a_single_color_stays_the_same() {
    for color in [[0; 3], [255; 3], [1, 128, 254]] {
        let image = RgbImage::filled(Size::new(7, 31), color);
        for filter in FILTERS {
            for size in [Size::new(1, 1), Size::new(64, 5), Size::new(3, 200)] {
                let resized = resize(&image, size, filter);
                assert_eq!(resized, RgbImage::filled(size, color), "{filter:?} {size}");
            }
        }
    }
}

#[test]
fn the_order_of_the_passes_is_that_of_pillow_13() {
    let order = |from: [u32; 2], to: [u32; 2]| {
        FirstPass::of_pillow(Size::new(from[0], from[1]), Size::new(to[0], to[1]))
    };
    assert_eq!(order([20, 20], [24, 19]), FirstPass::Vertical);
    assert_eq!(order([20, 20], [19, 18]), FirstPass::Horizontal);
    assert_eq!(order([20, 20], [19, 17]), FirstPass::Vertical);
    assert_eq!(order([20, 20], [40, 20]), FirstPass::Horizontal);
}

#[test]
fn a_part_is_equal_to_the_same_part_of_the_whole() {
    let image = picture(Size::new(40, 23));
    for filter in FILTERS {
        for size in
            [Size::new(13, 50), Size::new(91, 7), Size::new(40, 11), Size::new(19, 23), Size::new(39, 9)]
        {
            let whole = resize(&image, size, filter);
            let region = ImageRegion {
                left: size.width / 3,
                top: size.height / 4,
                size: Size::new(size.width / 2, size.height / 2),
            };
            let expected = whole.crop(region.left, region.top, region.size);
            assert_eq!(resize_region(&image, size, filter, region), expected, "{filter:?} {size}");
        }
    }
}

#[test]
fn a_part_of_a_huge_result_is_cheap() {
    let image = picture(Size::new(1, 30_000));
    let region = ImageRegion { left: 0, top: 5_000_000, size: Size::new(336, 336) };
    let resized = resize_region(&image, Size::new(336, 336 * 30_000), Filter::Bicubic, region);
    assert_eq!(resized.size(), region.size);
}

#[test]
fn sums_do_not_overflow() {
    // The sum of the absolute weights is largest for windows that are cut at the edge of the image.
    for filter in FILTERS {
        for from in 1..=40 {
            for to in 1..=120 {
                let taps = Taps::new(filter, WeightPrecision::Pillow, Scale { from, to }, 0..to);
                for window in &taps.windows {
                    let sum: i64 = window.weights.iter().map(|weight| i64::from(weight.abs())).sum();
                    assert!(sum * 255 + (1 << 21) <= i64::from(i32::MAX), "{filter:?} {from} to {to}");
                }
            }
        }
    }
}

#[test]
fn the_precision_of_torch_depends_on_the_largest_weight() {
    assert_eq!(torch_bits([1.0].iter()), 14);
    assert_eq!(torch_bits([0.5, 0.25].iter()), 15);
    assert_eq!(torch_bits([1e-9].iter()), 22);
}
