//! Sums and products in which matrices occur are worked out entry by entry, so that two matrices are all that
//! is left to compare.

use super::budget::{MAX_ITEMS, Stop};
use super::expr::Expr;

/// Largest product of two matrices, in multiplications of entries.
const MAX_PRODUCT: usize = 1000;
/// Largest product, in nodes of its entries: a chain of products doubles with every factor.
const MAX_NODES: usize = 8000;

/// The sum of terms; matrices of the same shape are added.
pub fn add(terms: Vec<Expr>) -> Result<Expr, Stop> {
    if !terms.iter().any(is_matrix_term) {
        return Ok(Expr::Add(terms));
    }
    let mut terms = terms.into_iter().map(scaled);
    let Some(Expr::Matrix(mut sum)) = terms.next() else {
        return Err(Stop);
    };
    for term in terms {
        let Expr::Matrix(rows) = term else {
            return Err(Stop);
        };
        let same_shape = rows.len() == sum.len() && rows.iter().zip(&sum).all(|(a, b)| a.len() == b.len());
        if !same_shape {
            return Err(Stop);
        }
        for (sum_row, row) in sum.iter_mut().zip(rows) {
            for (cell, addend) in sum_row.iter_mut().zip(row) {
                match cell {
                    Expr::Add(addends) => addends.push(addend),
                    _ => {
                        let first = std::mem::replace(cell, Expr::Empty);
                        *cell = Expr::Add(vec![first, addend]);
                    }
                }
            }
        }
    }
    Ok(Expr::Matrix(sum))
}

/// The product of factors; matrices are multiplied from left to right, numbers scale them.
pub fn multiply(factors: Vec<Expr>) -> Result<Expr, Stop> {
    if !factors.iter().any(|f| matches!(f, Expr::Matrix(_))) {
        return Ok(Expr::Mul(factors));
    }
    let mut scalars = Vec::new();
    let mut product: Option<Vec<Vec<Expr>>> = None;
    for factor in factors {
        match (factor, product.take()) {
            (Expr::Matrix(right), None) => product = Some(right),
            (Expr::Matrix(right), Some(left)) => product = Some(times(&left, &right)?),
            (scalar, kept) => {
                scalars.push(scalar);
                product = kept;
            }
        }
    }
    let rows = product.ok_or(Stop)?;
    Ok(if scalars.is_empty() { Expr::Matrix(rows) } else { scale(&Expr::Mul(scalars), rows) })
}

fn is_matrix_term(term: &Expr) -> bool {
    match term {
        Expr::Matrix(_) => true,
        Expr::Mul(factors) => factors.iter().any(|f| matches!(f, Expr::Matrix(_))),
        _ => false,
    }
}

/// A negated matrix term as a matrix.
fn scaled(term: Expr) -> Expr {
    match term {
        Expr::Mul(factors) if factors.len() == 2 && matches!(factors[1], Expr::Matrix(_)) => {
            let mut parts = factors.into_iter();
            match (parts.next(), parts.next()) {
                (Some(k), Some(Expr::Matrix(rows))) => scale(&k, rows),
                _ => Expr::Empty,
            }
        }
        other => other,
    }
}

fn scale(scalar: &Expr, rows: Vec<Vec<Expr>>) -> Expr {
    let times = |cell: Expr| Expr::Mul(vec![scalar.clone(), cell]);
    Expr::Matrix(rows.into_iter().map(|row| row.into_iter().map(times).collect()).collect())
}

fn times(left: &[Vec<Expr>], right: &[Vec<Expr>]) -> Result<Vec<Vec<Expr>>, Stop> {
    let inner = right.len();
    let width = right.first().map_or(0, Vec::len);
    let fits = left.iter().all(|row| row.len() == inner) && right.iter().all(|row| row.len() == width);
    if !fits || left.len() * inner * width > MAX_PRODUCT || width > MAX_ITEMS {
        return Err(Stop);
    }
    let entry = |row: &[Expr], column: usize| {
        let products = row.iter().zip(right).map(|(a, b)| Expr::Mul(vec![a.clone(), b[column].clone()]));
        Expr::Add(products.collect())
    };
    let nodes = |rows: &[Vec<Expr>]| {
        let mut count = 0;
        rows.iter().flatten().for_each(|cell| cell.walk(&mut |_| count += 1));
        count
    };
    if width * nodes(left) + left.len() * nodes(right) > MAX_NODES {
        return Err(Stop);
    }
    Ok(left.iter().map(|row| (0..width).map(|column| entry(row, column)).collect()).collect())
}
