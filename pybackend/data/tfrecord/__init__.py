"""TFRecord files of tf.train.Example, written and read by numpy and Arrow, without TensorFlow."""
