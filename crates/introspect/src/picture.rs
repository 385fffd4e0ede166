//! The colour map as a picture like Kaleidoscope's figure 3: one pixel for each frame, in rows from
//! left to right.

use crate::colour::Colour;
use std::io::Write;
use std::num::NonZeroU32;

/// Red, green and blue of a colour, as in the figure where the figure has the colour. Page cache is
/// yellow, free memory black. User data is light blue, kernel data dark blue, user code light red,
/// kernel code dark red.
#[must_use]
pub fn rgb(colour: Colour) -> [u8; 3] {
    match colour {
        Colour::Unknown => [0x80, 0x80, 0x80],
        Colour::Free => [0, 0, 0],
        Colour::KernelCode => [0x9b, 0x11, 0x1e],
        Colour::KernelData => [0x1f, 0x3a, 0x93],
        Colour::UserCode => [0xff, 0x6b, 0x6b],
        Colour::UserData => [0x6f, 0xb7, 0xff],
        Colour::PageCache => [0xff, 0xd7, 0x00],
        Colour::PageTable => [0x2e, 0xcc, 0x71],
        Colour::Slab => [0x8e, 0x5b, 0xc0],
    }
}

/// Writes a PNG with `width` frames in a row. The rest of the last row counts as unknown.
///
/// # Errors
/// If writing fails, or if there are more rows than a PNG can have.
pub fn write_png(
    colours: &[Colour],
    width: NonZeroU32,
    to: impl Write,
) -> Result<(), png::EncodingError> {
    let row = usize::try_from(width.get()).map_err(|_| png::EncodingError::LimitsExceeded)?;
    let rows = u32::try_from(colours.len().div_ceil(row).max(1))
        .map_err(|_| png::EncodingError::LimitsExceeded)?;
    let mut encoder = png::Encoder::new(to, width.get(), rows);
    encoder.set_color(png::ColorType::Indexed);
    encoder.set_depth(png::BitDepth::Eight);
    encoder.set_palette(Colour::ALL.map(rgb).concat());
    let mut pixels: Vec<u8> = colours.iter().map(|colour| colour.number()).collect();
    pixels.resize(colours.len().max(1).next_multiple_of(row), Colour::Unknown.number());
    let mut writer = encoder.write_header()?;
    writer.write_image_data(&pixels)?;
    writer.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_picture_reads_back_pixel_by_pixel() {
        let colours: Vec<Colour> = Colour::ALL.into_iter().cycle().take(100).collect();
        let mut file = Vec::new();
        write_png(&colours, NonZeroU32::new(32).unwrap(), &mut file).unwrap();
        let mut decoder = png::Decoder::new(std::io::Cursor::new(file));
        decoder.set_transformations(png::Transformations::EXPAND);
        let mut reader = decoder.read_info().unwrap();
        let mut pixels = vec![0; reader.output_buffer_size().unwrap()];
        let info = reader.next_frame(&mut pixels).unwrap();
        assert_eq!((info.width, info.height), (32, 4));
        for (n, pixel) in pixels.chunks(3).enumerate() {
            assert_eq!(pixel, rgb(colours.get(n).copied().unwrap_or(Colour::Unknown)), "{n}");
        }
    }
}
