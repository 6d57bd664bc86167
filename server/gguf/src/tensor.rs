//! Tensor types and the entries of the tensor directory.

use std::fmt;

macro_rules! tensor_types {
    ($($variant:ident = $number:literal, $name:literal, $block_values:literal, $block_bytes:literal;)*) => {
        /// The format of a tensor's values: every type that ggml defines. [`TensorType::is_decodable`] shows which
        /// types this crate can decode.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[expect(missing_docs, reason = "each variant is named like its ggml type")]
        pub enum TensorType { $($variant,)* }

        impl TensorType {
            /// Every tensor type that ggml defines.
            pub const ALL: &[Self] = &[$(Self::$variant,)*];

            /// The type that this number represents in a file.
            pub fn from_number(number: u32) -> Option<Self> {
                match number { $($number => Some(Self::$variant),)* _ => None }
            }

            /// The number that represents the type in a file.
            pub fn number(self) -> u32 {
                match self { $(Self::$variant => $number,)* }
            }

            /// The name of the type in ggml, such as `Q4_K`.
            pub fn name(self) -> &'static str {
                match self { $(Self::$variant => $name,)* }
            }

            /// The number of values in a block.
            pub fn block_values(self) -> usize {
                match self { $(Self::$variant => $block_values,)* }
            }

            /// The number of bytes of a block.
            pub fn block_bytes(self) -> usize {
                match self { $(Self::$variant => $block_bytes,)* }
            }
        }
    };
}

tensor_types! {
    F32 = 0, "F32", 1, 4;
    F16 = 1, "F16", 1, 2;
    Q4_0 = 2, "Q4_0", 32, 18;
    Q4_1 = 3, "Q4_1", 32, 20;
    Q5_0 = 6, "Q5_0", 32, 22;
    Q5_1 = 7, "Q5_1", 32, 24;
    Q8_0 = 8, "Q8_0", 32, 34;
    Q8_1 = 9, "Q8_1", 32, 36;
    Q2K = 10, "Q2_K", 256, 84;
    Q3K = 11, "Q3_K", 256, 110;
    Q4K = 12, "Q4_K", 256, 144;
    Q5K = 13, "Q5_K", 256, 176;
    Q6K = 14, "Q6_K", 256, 210;
    Q8K = 15, "Q8_K", 256, 292;
    Iq2Xxs = 16, "IQ2_XXS", 256, 66;
    Iq2Xs = 17, "IQ2_XS", 256, 74;
    Iq3Xxs = 18, "IQ3_XXS", 256, 98;
    Iq1S = 19, "IQ1_S", 256, 50;
    Iq4Nl = 20, "IQ4_NL", 32, 18;
    Iq3S = 21, "IQ3_S", 256, 110;
    Iq2S = 22, "IQ2_S", 256, 82;
    Iq4Xs = 23, "IQ4_XS", 256, 136;
    I8 = 24, "I8", 1, 1;
    I16 = 25, "I16", 1, 2;
    I32 = 26, "I32", 1, 4;
    I64 = 27, "I64", 1, 8;
    F64 = 28, "F64", 1, 8;
    Iq1M = 29, "IQ1_M", 256, 56;
    Bf16 = 30, "BF16", 1, 2;
    Tq1_0 = 34, "TQ1_0", 256, 54;
    Tq2_0 = 35, "TQ2_0", 256, 66;
    Mxfp4 = 39, "MXFP4", 32, 17;
    Nvfp4 = 40, "NVFP4", 64, 36;
    Q1_0 = 41, "Q1_0", 128, 18;
}

/// The layout of the quantized values of a type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QuantLayout {
    /// The number of bits of a quantized value.
    pub bits: u32,
    /// The number of values that share a scale.
    pub group: usize,
    /// The integer zero point of all values.
    pub zero: u8,
    /// Whether each group has a minimum.
    pub has_min: bool,
}

impl TensorType {
    /// Whether [`dequantize`](fn@crate::dequantize) supports this type.
    pub fn is_decodable(self) -> bool {
        self.is_quantized() || matches!(self, Self::F32 | Self::F16 | Self::Bf16)
    }

    /// Whether this is a quantized type that this crate can decode.
    pub fn is_quantized(self) -> bool {
        self.quant_layout().is_some()
    }

    /// Returns the layout of the quantized values, or `None` if this type is not quantized or this crate cannot decode
    /// it.
    pub fn quant_layout(self) -> Option<QuantLayout> {
        let (bits, group, zero, has_min) = match self {
            Self::Q4_0 => (4, 32, 8, false),
            Self::Q4_1 => (4, 32, 0, true),
            Self::Q5_0 => (5, 32, 16, false),
            Self::Q5_1 => (5, 32, 0, true),
            Self::Q8_0 => (8, 32, 128, false),
            Self::Q2K => (2, 16, 0, true),
            Self::Q3K => (3, 16, 4, false),
            Self::Q4K => (4, 32, 0, true),
            Self::Q5K => (5, 32, 0, true),
            Self::Q6K => (6, 16, 32, false),
            // A quant is twice the E2M1 number plus 12, so it is an integer from 0 to 24.
            Self::Mxfp4 => (5, 32, 12, false),
            _ => return None,
        };
        Some(QuantLayout { bits, group, zero, has_min })
    }

    /// Returns the number of bytes that `values` values take, or `None` if `values` is not a multiple of the block size
    /// or the product overflows.
    pub fn bytes_of(self, values: u64) -> Option<u64> {
        let block_values = self.block_values() as u64;
        if !values.is_multiple_of(block_values) {
            return None;
        }
        (values / block_values).checked_mul(self.block_bytes() as u64)
    }
}

impl fmt::Display for TensorType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// An entry of the tensor directory. The tensor is known to lie within its file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorEntry {
    /// The name of the tensor.
    pub name: String,
    /// The dimensions in the order of ggml: `shape[0]` is the length of a row and varies fastest.
    pub shape: Vec<u64>,
    /// The type of the stored values.
    pub kind: TensorType,
    /// The index of the file that stores the tensor, in [`GgufFile::paths`](crate::GgufFile::paths).
    pub part: usize,
    /// The offset of the tensor's first byte from the start of the file that stores it, in bytes.
    pub offset: u64,
    /// The number of bytes of the tensor.
    pub bytes: u64,
}

impl TensorEntry {
    /// The total number of values.
    pub fn values(&self) -> u64 {
        self.shape.iter().product()
    }

    /// The number of rows: the product of all dimensions except the first.
    pub fn rows(&self) -> u64 {
        self.shape[1..].iter().product()
    }

    /// The number of bytes of a row.
    pub fn row_bytes(&self) -> u64 {
        self.bytes / self.rows()
    }
}
