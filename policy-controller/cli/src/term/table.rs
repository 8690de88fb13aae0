//! Plain tables: the first column to the left, the others to the right.

use super::{Line, Tone};

/// Columns between two cells.
const GAP: usize = 2;

/// A table with a head.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Table {
    rows: Vec<Vec<String>>,
}

// === impl Table ===

impl Table {
    /// A table with this head.
    pub(crate) fn new<T: Into<String>>(head: impl IntoIterator<Item = T>) -> Self {
        Self {
            rows: vec![head.into_iter().map(Into::into).collect()],
        }
    }

    /// Adds a row.
    pub(crate) fn row<T: Into<String>>(mut self, cells: impl IntoIterator<Item = T>) -> Self {
        self.rows.push(cells.into_iter().map(Into::into).collect());
        self
    }

    /// Columns that it takes.
    pub(crate) fn width(&self) -> usize {
        let widths = self.widths();
        widths.iter().sum::<usize>() + GAP * widths.len().saturating_sub(1)
    }

    /// Rows as columns.
    pub(crate) fn turned(&self) -> Self {
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or(0);
        let column = |c: usize| {
            let cell = |row: &Vec<String>| row.get(c).cloned().unwrap_or_default();
            self.rows.iter().map(cell).collect()
        };
        Self {
            rows: (0..columns).map(column).collect(),
        }
    }

    /// The first of this and its turned form that fits, or else the narrower.
    pub(crate) fn fitting(&self, width: usize) -> Self {
        let turned = self.turned();
        if self.width() <= width || self.width() <= turned.width() {
            self.clone()
        } else {
            turned
        }
    }

    /// Its lines. The head is faint.
    pub(crate) fn lines(&self) -> Vec<Line> {
        let widths = self.widths();
        let line = |(i, row): (usize, &Vec<String>)| {
            let mut text = String::new();
            for (c, (cell, width)) in row.iter().zip(&widths).enumerate() {
                let fill = " ".repeat(width.saturating_sub(cell.chars().count()));
                if c == 0 {
                    text += cell;
                    text += &fill;
                } else {
                    text += &" ".repeat(GAP);
                    text += &fill;
                    text += cell;
                }
            }
            let tone = if i == 0 { Tone::Faint } else { Tone::Plain };
            Line::new(tone, text.trim_end())
        };
        self.rows.iter().enumerate().map(line).collect()
    }

    fn widths(&self) -> Vec<usize> {
        let mut widths = Vec::new();
        for row in &self.rows {
            for (c, cell) in row.iter().enumerate() {
                let width = cell.chars().count();
                match widths.get_mut(c) {
                    Some(w) => *w = width.max(*w),
                    None => widths.push(width),
                }
            }
        }
        widths
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(table: &Table) -> Vec<String> {
        table.lines().iter().map(|l| l.render(false)).collect()
    }

    fn table() -> Table {
        Table::new(["", "median", "hits"])
            .row(["forebay", "0.35 s", "78 %"])
            .row(["λ", "6.9 s", "31 %"])
    }

    #[test]
    fn columns_line_up_by_characters() {
        let lines = text(&table());
        assert_eq!(
            lines,
            [
                "         median  hits",
                "forebay  0.35 s  78 %",
                "λ         6.9 s  31 %"
            ]
        );
        assert_eq!(table().width(), 21);
    }

    #[test]
    fn turns_when_it_does_not_fit() {
        let wide = Table::new(["", "a long head", "another head"]).row(["forebay", "1", "2"]);
        assert_eq!(wide.fitting(80), wide);
        let turned = wide.fitting(25);
        assert_eq!(
            text(&turned),
            [
                "              forebay",
                "a long head         1",
                "another head        2"
            ]
        );
        assert_eq!(turned.turned(), wide);
        assert!(wide.fitting(5).width() < wide.width());
    }

    #[test]
    fn rows_may_be_short() {
        let table = Table::new(["a", "b"]).row(["1"]);
        assert_eq!(text(&table.turned()), ["a  1", "b"]);
    }
}
