//! Curves as a PNG, both axes logarithmic.

use std::path::Path;

use anyhow::{Context, Result, anyhow, ensure};
use plotters::prelude::*;

use crate::canvas::{self, Canvas};

/// A curve.
#[derive(Clone, Debug)]
pub struct Line {
    /// What it is.
    pub name: String,
    /// Points; those that are not above 0 both ways have no place on logarithmic axes and are left out.
    pub points: Vec<(f64, f64)>,
}

/// One chart.
#[derive(Clone, Debug)]
pub struct Panel {
    /// What it shows.
    pub title: String,
    /// What the horizontal axis says.
    pub across: String,
    /// What the vertical axis says.
    pub up: String,
    /// The curves.
    pub lines: Vec<Line>,
}

/// Width and height of a panel in pixels.
const PANEL: (u32, u32) = (760, 480);

/// Colours that differ also for those who see few.
const COLOURS: [RGBColor; 6] = [
    RGBColor(0, 114, 178),
    RGBColor(213, 94, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(86, 180, 233),
    RGBColor(120, 120, 120),
];

/// Writes `panels`, two beside each other, to the file `path`.
///
/// # Errors
/// When a panel has no point, or the file can't be written.
pub fn write(path: &Path, panels: &[Panel]) -> Result<()> {
    ensure!(!panels.is_empty(), "{}: there is nothing to draw", path.display());
    let columns = panels.len().min(2) as u32;
    let rows = (panels.len() as u32).div_ceil(columns);
    let size = (PANEL.0 * columns, PANEL.1 * rows);
    let mut pixels = vec![255; (size.0 * size.1 * 3) as usize];
    {
        let area = Canvas::on(&mut pixels, size).into_drawing_area();
        let parts = area.split_evenly((rows as usize, columns as usize));
        for (panel, part) in panels.iter().zip(&parts) {
            draw(panel, part).with_context(|| format!("can't draw \"{}\"", panel.title))?;
        }
    }
    canvas::write(path, &pixels, size)
}

type Area<'a> = DrawingArea<Canvas<'a>, plotters::coord::Shift>;

fn draw(panel: &Panel, area: &Area<'_>) -> Result<()> {
    let fault = |error: &dyn std::fmt::Display| anyhow!("{error}");
    let points = || panel.lines.iter().flat_map(|line| line.points.iter()).filter(|(x, y)| *x > 0.0 && *y > 0.0);
    let (across, up) = (range(points().map(|point| point.0))?, range(points().map(|point| point.1))?);
    let mut chart = ChartBuilder::on(area)
        .caption(&panel.title, ("sans-serif", 20))
        .margin(14)
        .x_label_area_size(46)
        .y_label_area_size(84)
        .build_cartesian_2d((across.0..across.1).log_scale(), decades(up).log_scale())
        .map_err(|error| fault(&error))?;
    chart
        .configure_mesh()
        .label_style(("sans-serif", 16))
        .axis_desc_style(("sans-serif", 16))
        .light_line_style(WHITE)
        .x_desc(&panel.across)
        .y_desc(&panel.up)
        .x_labels(8)
        .y_labels(8)
        .x_label_formatter(&|value| short(*value))
        .y_label_formatter(&|value| short(*value))
        .draw()
        .map_err(|error| fault(&error))?;
    for (line, colour) in panel.lines.iter().zip(COLOURS.iter().cycle()) {
        let shown: Vec<(f64, f64)> = line.points.iter().copied().filter(|(x, y)| *x > 0.0 && *y > 0.0).collect();
        let marks = shown.iter().map(|point| Circle::new(*point, 4, colour.filled()));
        chart.draw_series(marks).map_err(|error| fault(&error))?;
        chart
            .draw_series(LineSeries::new(shown.clone(), colour.stroke_width(2)))
            .map_err(|error| fault(&error))?
            .label(&line.name)
            .legend(|(x, y)| PathElement::new([(x, y), (x + 18, y)], colour.stroke_width(3)));
    }
    chart
        .configure_series_labels()
        .label_font(("sans-serif", 16))
        .position(SeriesLabelPosition::UpperLeft)
        .background_style(WHITE.mix(0.8))
        .draw()
        .map_err(|error| fault(&error))
}

/// From the least to the greatest of `values`, with some room where they are one.
fn range(values: impl Iterator<Item = f64>) -> Result<(f64, f64)> {
    let (least, most) =
        values.fold((f64::INFINITY, 0.0f64), |(least, most), value| (least.min(value), most.max(value)));
    ensure!(least <= most, "it has no point above 0");
    Ok(if most / least < 1.5 { (least / 2.0, most * 2.0) } else { (least, most) })
}

/// Whole powers of ten around a range, with room above it for the names of the curves.
fn decades((least, most): (f64, f64)) -> std::ops::Range<f64> {
    10f64.powf(least.log10().floor())..10f64.powf((most * 2.0).log10().ceil())
}

/// A number with a letter for its size.
fn short(value: f64) -> String {
    let (scaled, unit) = match value {
        v if v >= 1e9 => (v / 1e9, "G"),
        v if v >= 1e6 => (v / 1e6, "M"),
        v if v >= 1e3 => (v / 1e3, "k"),
        v => (v, ""),
    };
    // As many digits as say something.
    let text = format!("{scaled:.3}");
    format!("{}{unit}", text.trim_end_matches('0').trim_end_matches('.'))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn panel(points: Vec<(f64, f64)>) -> Panel {
        let line = Line { name: "a line".to_owned(), points };
        Panel { title: "a title".to_owned(), across: "pages".to_owned(), up: "us".to_owned(), lines: vec![line] }
    }

    #[test]
    fn a_picture_has_the_size_of_its_panels_and_is_not_empty() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("new/picture.png");
        let curve = panel(vec![(1e3, 2.0), (1e5, 3.0), (1e7, 40.0)]);
        write(&path, &[curve.clone(), curve.clone(), curve]).unwrap();
        let decoder = png::Decoder::new(std::io::BufReader::new(std::fs::File::open(&path).unwrap()));
        let mut reader = decoder.read_info().unwrap();
        assert_eq!((reader.info().width, reader.info().height), (2 * PANEL.0, 2 * PANEL.1));
        let mut pixels = vec![0; reader.output_buffer_size().unwrap()];
        reader.next_frame(&mut pixels).unwrap();
        let blue = pixels.chunks(3).filter(|pixel| *pixel == [0, 114, 178]).count();
        assert!(blue > 3 * 300, "{blue} pixels of three curves");
        assert!(pixels.chunks(3).any(|pixel| pixel == [0, 0, 0]), "no letter is drawn");
    }

    #[test]
    fn a_panel_without_a_point_is_an_error_that_names_it() {
        let folder = tempfile::tempdir().unwrap();
        let error = write(&folder.path().join("a.png"), &[panel(vec![(1e3, 0.0)])]).unwrap_err();
        assert!(format!("{error:#}").contains("a title"), "{error:#}");
    }

    #[test]
    fn numbers_are_short() {
        assert_eq!(["0.02", "3", "1k", "2.5M"].map(str::to_owned), [0.02, 3.0, 1e3, 2.5e6].map(short));
    }
}
