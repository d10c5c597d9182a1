//! A picture in memory that `plotters` draws on, with a font that needs nothing of the system, written as a PNG.

use std::convert::Infallible;
use std::fs::File;
use std::io::BufWriter;
use std::path::Path;

use anyhow::{Context, Result};
use noto_sans_mono_bitmap::{FontWeight, RasterHeight, get_raster, get_raster_width};
use plotters_backend::text_anchor::{HPos, VPos};
use plotters_backend::{BackendColor, BackendCoord, BackendTextStyle, DrawingBackend, DrawingErrorKind};

/// Rows of pixels, three bytes each.
pub struct Canvas<'a> {
    pixels: &'a mut [u8],
    size: (u32, u32),
}

type Drawn = std::result::Result<(), DrawingErrorKind<Infallible>>;

impl<'a> Canvas<'a> {
    /// Draws on `pixels`, which has three bytes for each of `size`.
    pub fn on(pixels: &'a mut [u8], size: (u32, u32)) -> Self {
        Self { pixels, size }
    }
}

/// The nearest of the two sizes that the font has.
fn height(size: f64) -> RasterHeight {
    if size > 18.0 { RasterHeight::Size20 } else { RasterHeight::Size16 }
}

fn size_of_text(text: &str, size: f64) -> (u32, u32) {
    let width = get_raster_width(FontWeight::Regular, height(size)) * text.chars().count();
    (width as u32, height(size).val() as u32)
}

impl DrawingBackend for Canvas<'_> {
    type ErrorType = Infallible;

    fn get_size(&self) -> (u32, u32) {
        self.size
    }

    fn ensure_prepared(&mut self) -> Drawn {
        Ok(())
    }

    fn present(&mut self) -> Drawn {
        Ok(())
    }

    fn draw_pixel(&mut self, (x, y): BackendCoord, color: BackendColor) -> Drawn {
        let (Ok(x), Ok(y)) = (u32::try_from(x), u32::try_from(y)) else { return Ok(()) };
        if x >= self.size.0 || y >= self.size.1 {
            return Ok(());
        }
        let start = (y * self.size.0 + x) as usize * 3;
        let (red, green, blue) = color.rgb;
        for (place, shade) in self.pixels.iter_mut().skip(start).zip([red, green, blue]) {
            *place = (f64::from(*place) * (1.0 - color.alpha) + f64::from(shade) * color.alpha).round() as u8;
        }
        Ok(())
    }

    fn draw_text<S: BackendTextStyle>(&mut self, text: &str, style: &S, place: BackendCoord) -> Drawn {
        let (width, tall) = size_of_text(text, style.size());
        let left = match style.anchor().h_pos {
            HPos::Left => 0,
            HPos::Right => -(width as i32),
            HPos::Center => -(width as i32) / 2,
        };
        let top = match style.anchor().v_pos {
            VPos::Top => 0,
            VPos::Center => -(tall as i32) / 2,
            VPos::Bottom => -(tall as i32),
        };
        let (turn, color) = (style.transform(), style.color());
        let step = get_raster_width(FontWeight::Regular, height(style.size())) as i32;
        for (index, letter) in text.chars().enumerate() {
            // A letter that the font lacks leaves its place empty.
            let Some(raster) = get_raster(letter, FontWeight::Regular, height(style.size())) else { continue };
            for (row, line) in raster.raster().iter().enumerate() {
                for (column, shade) in line.iter().enumerate().filter(|(_, shade)| **shade > 0) {
                    let x = left + index as i32 * step + column as i32;
                    let (x, y) = turn.transform(x, top + row as i32);
                    let alpha = color.alpha * f64::from(*shade) / 255.0;
                    self.draw_pixel((place.0 + x, place.1 + y), BackendColor { alpha, ..color })?;
                }
            }
        }
        Ok(())
    }

    fn estimate_text_size<S: BackendTextStyle>(
        &self,
        text: &str,
        style: &S,
    ) -> std::result::Result<(u32, u32), DrawingErrorKind<Infallible>> {
        Ok(size_of_text(text, style.size()))
    }
}

/// Writes `pixels` as a PNG.
///
/// # Errors
/// When the file can't be written.
pub fn write(path: &Path, pixels: &[u8], size: (u32, u32)) -> Result<()> {
    let what = || format!("can't write {}", path.display());
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder).with_context(|| format!("can't create {}", folder.display()))?;
    }
    let mut encoder = png::Encoder::new(BufWriter::new(File::create(path).with_context(what)?), size.0, size.1);
    encoder.set_color(png::ColorType::Rgb);
    encoder.set_depth(png::BitDepth::Eight);
    encoder.set_compression(png::Compression::High);
    let mut writer = encoder.write_header().with_context(what)?;
    writer.write_image_data(pixels).with_context(what)?;
    writer.finish().with_context(what)
}
